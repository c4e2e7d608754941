"""What people see while a model is loaded."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

from process import environment

MODEL = "/home/someone/.cache/huggingface/hub/models--owner--a-name-GGUF/snapshots/" + 40 * "a" + "/a-name-Q8_0.gguf"
SHOW = "import sys; from headstart.cli.console import loading\nwith loading(sys.argv[1]) as told: told(0.4)"


def test_a_long_path_leaves_the_bar_on_the_screen() -> None:
    screen, terminal = pty.openpty()
    command = [sys.executable, "-c", SHOW, MODEL]
    subprocess.run(command, stderr=terminal, env=environment(TERM="xterm", COLUMNS="60", LINES="20"), check=True, timeout=60)
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(screen, 4096):
            shown += part
    except OSError:  # Linux: nobody writes any more
        pass
    finally:
        os.close(screen)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"loading a-name-Q8_0 .* 40%", text), text
