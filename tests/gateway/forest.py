"""Small forests for tests."""

from array import array

from titogym.gateway.engines.base import VersionSpan
from titogym.gateway.sessions.matchers import matcher
from titogym.gateway.sessions.policies import Placement, policy
from titogym.gateway.sessions.tree import Generation, Node, Tree
from titogym.templates.conversation import Message, Prefix

PREFIX = Prefix()


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str, reasoning: str = "") -> Message:
    return Message("assistant", text, reasoning)


def generation(prompt=(1, 2), output=(3, 4), trim=0, finish="stop", version="v0", routes=None) -> Generation:
    return Generation(
        trim=trim,
        prompt_ids=array("i", prompt),
        output_ids=array("i", output),
        logprobs=array("f", [-0.5] * len(output)),
        spans=(VersionSpan(0, len(output), version),),
        finish=finish,
        engine="http://engine",
        routes=routes,
    )


def place(tree: Tree, messages, rules: str, prefix: Prefix = PREFIX) -> Placement:
    return policy(rules)(tree, tree.find(prefix, messages))


def turn(
    tree: Tree, messages, reply: Message, rules: str = "linear", prefix: Prefix = PREFIX, **tokens
) -> Node:
    """Serve one request as the service does, with made-up tokens."""
    placement = place(tree, messages, rules, prefix)
    parent, old = placement.parent, placement.supersedes
    new = tuple(messages[parent.depth if parent else 0 :])
    node = tree.draft(parent, prefix, new, reply, generation(**tokens), old.id if old else None)
    tree.append(node)
    return node


def tree(rule: str = "strict") -> Tree:
    return Tree(matcher(rule))
