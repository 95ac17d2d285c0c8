"""Takes SGLang's command line, then serves scripted answers until it is killed.

`--crash` makes it fail at once, as SGLang does with a message about what it could not do.
"""

import argparse
import sys
import time

from tests.doubles.scripted_engine import ScriptedEngine

parser = argparse.ArgumentParser()
parser.add_argument("--model-path")
parser.add_argument("--port", type=int)
parser.add_argument("--crash", action="store_true")
options, others = parser.parse_known_args()
print("arguments:", " ".join(sys.argv[1:]), flush=True)
if options.crash:
    sys.exit("RuntimeError: no memory for the KV cache")
with ScriptedEngine(lambda prompt, params: [7], port=options.port, model_path=options.model_path):
    while True:
        time.sleep(60)
