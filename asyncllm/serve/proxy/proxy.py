"""LMDeploy's place of the request distributor: `python -m asyncllm.serve.proxy.proxy` is `asyncllm serve proxy`."""

from __future__ import annotations

import sys

from asyncllm.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", "proxy", *sys.argv[1:]]))
