"""Host time per round outside model evaluation, and device syncs per round.

    python benchmarks/host_time.py [--model M] [--method dspark|lookup|none] [--tokens N]

Host time is a round's length less the waits for the device and less the calls
of the target model, which on MLX's lazy backend build its graph.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from datetime import date

from dspark_mlx.events import StepDone
from dspark_mlx.loading import LoadOptions, load_engine
from dspark_mlx.request import Request

PROMPT = "Write a Python function that reverses a list, then explain each line of it."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--method", default="auto")
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    engine, loaded = load_engine(LoadOptions(args.model, method=args.method))
    message = {"role": "user", "content": PROMPT}
    engine.submit(Request("bench", messages=(message,), max_tokens=args.tokens, ignore_eos=True))
    steps: list[StepDone] = []
    while engine.active:
        steps += [e for e in engine.step() if isinstance(e, StepDone)]
    steps = steps[3:]  # the first rounds warm up
    host = [1e3 * s.host_seconds for s in steps]
    whole = [1e3 * s.round_seconds for s in steps]
    print(f"{loaded.model}, method {loaded.method}, {platform.machine()}, {date.today()}")
    print(f"rounds {len(steps)}, syncs a round {statistics.mean(s.syncs for s in steps):.2f}")
    print(f"host ms a round: median {statistics.median(host):.2f}, max {max(host):.2f}")
    print(f"round ms: median {statistics.median(whole):.1f}")


if __name__ == "__main__":
    main()
