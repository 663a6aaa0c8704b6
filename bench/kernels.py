"""Every op of asyncllm/kernels at the shapes of Llama-3-8B, against what it must move and compute, and against torch.

    python bench/kernels.py [--only REGEX] [--no-peers] [--json FILE]

Latent attention has the shapes of DeepSeek-V2-Lite, delta nets those of Qwen3-Next.

Each op is captured in a CUDA graph of at least 20 calls, on as many sets of inputs in turn as it takes for none to be
found in the L2 cache, unless the entry says that they lie there in a step as well. The figure is the median over
replays, so that launching costs nothing and neighbours may overlap as they do in a step. `ceiling` is the time that its
bytes or its operations take at the speeds that bench/limits.py measures in the same run, the longer of the two, over
the time taken; `torch` is torch's time over ours.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="entries whose name matches")
    parser.add_argument("--no-peers", action="store_true", help="do not time torch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the figures to this file")
    arguments = parser.parse_args()

    # Imported here: transformers takes a module called kernels for the hub library of that name, and imports it.
    import limits
    import torch
    from kernel_entries import LLAMA_3_8B, entries
    from kernel_timing import format_line, measure
    from table import emit
    from tqdm import tqdm

    if not torch.cuda.is_available():
        sys.exit("bench/kernels.py times kernels on a GPU, and torch finds none here.")
    ceilings = limits.measure()
    emit(ceilings, arguments.json)
    wanted = [entry for entry in entries(LLAMA_3_8B) if re.search(arguments.only, entry.name)]
    for entry in tqdm(wanted, unit="entry", file=sys.stderr, leave=False):
        result = measure(entry, LLAMA_3_8B.device, ceilings, peers=not arguments.no_peers)
        tqdm.write(format_line(result), file=sys.stdout)
        if arguments.json:
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
