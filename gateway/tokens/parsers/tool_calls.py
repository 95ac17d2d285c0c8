"""The parser of each kind of tool-call format that families declare."""

from titogym.gateway.tokens.parsers.bare_json import BareJsonParser
from titogym.gateway.tokens.parsers.blocks import ToolCallParser, new_call_id
from titogym.gateway.tokens.parsers.json_calls import BlockParser, HermesParser
from titogym.gateway.tokens.parsers.marked import MarkedJsonParser, MarkupParser

__all__ = ["HARMONY", "PARSERS", "ToolCallParser", "new_call_id"]

HARMONY = "harmony"  # not among them: its calls stand among reasoning and content (see `harmony`)
PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes_json": HermesParser,
    "json_list": BlockParser,
    "bare_json": BareJsonParser,
    "marked_json": MarkedJsonParser,
    "markup": MarkupParser,
}
