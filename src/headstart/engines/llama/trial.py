"""Trial: a process that loads a model with an untested library of llama.cpp, and reports how far it comes (`first_load`).

It reads a request from stdin as JSON, and writes lines of JSON to stdout: `{"share": 0.5}` while it loads, then
`{"done": …}` or `{"error": …}`. What llama.cpp writes goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from headstart.engines.llama import first_load
from headstart.engines.llama.engine import LlamaEngine
from headstart.errors import ConfigError


def main() -> None:
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as wire:
        os.dup2(2, 1)  # native code must not write between the lines

        def report(**message: Any) -> None:
            wire.write(json.dumps(message) + "\n")
            wire.flush()

        report(share=0.0)
        options = first_load.read(request["options"])
        try:
            first_load.accept(options)
            if not request["whole"]:
                LlamaEngine.load_tokenizer(options).close()
                report(done={"movable": True})
                return
            engine = LlamaEngine.load(options, progress=lambda share: report(share=float(share)))
        except ConfigError as error:
            # With its marks of options, which each surface writes in its own form.
            report(error={"kind": type(error).__name__, "message": str(error.args[0])})
            return
        report(done={"movable": engine.traits.movable, "notes": engine.traits.notes})
        engine.close()


if __name__ == "__main__":
    main()
