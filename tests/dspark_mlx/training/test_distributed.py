"""Data-parallel training by MLX's own launcher is the same training."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from toys import ToyTokenizer
from training_toys import answers, chain_model, model_config, toy_options, write_jsonl

from dspark_mlx.training.checkpoint import list_checkpoints, load_checkpoint
from dspark_mlx.training.run import train_drafter
from dspark_mlx.training.run_log import read_log

SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import dspark_mlx
from pathlib import Path
import mlx.core as mx
from toys import ToyTokenizer
from training_toys import chain_model, model_config, toy_options
from dspark_mlx.training.run import train_drafter
mx.set_default_device(mx.cpu)
group = mx.distributed.init(strict=True, backend="ring")
assert group.size() == 2
model = chain_model()
train_drafter(
    model, ToyTokenizer(), model_config(model), [Path({data!r})], Path({out!r}),
    toy_options(steps=8, validate_every=4), group=group, say=lambda text: None,
)
"""


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that are free on the loopback."""
    for first in range(31000, 60000, 50):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for i, s in enumerate(sockets):
                s.bind(("127.0.0.1", first + i))
            return first
        except OSError:
            continue
        finally:
            for s in sockets:
                s.close()
    pytest.skip("no free ports on the loopback")


def test_two_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    model = chain_model()
    data = write_jsonl(tmp_path / "d.jsonl", answers(model, 60))
    alone = toy_options(steps=8, validate_every=4, accumulate=2)
    train_drafter(
        model, ToyTokenizer(), model_config(model), [data], tmp_path / "one", alone,
        say=lambda text: None,
    )  # fmt: skip
    root = Path(__file__).parents[3]
    script = tmp_path / "run.py"
    paths = [str(root), str(root / "tests")]
    script.write_text(SCRIPT.format(paths=paths, data=str(data), out=str(tmp_path / "two")))
    main = "from mlx._distributed_utils.launch import main; main()"
    launcher = [sys.executable, "-c", main]
    done = subprocess.run(
        [*launcher, "-n", "2", "--backend", "ring", "--starting-port", str(free_ports(2)),
         "--python", sys.executable, str(script)],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (read_log(tmp_path / name / "log.jsonl") for name in ("one", "two"))
    assert len(one) == len(two) == 10
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
        if a["kind"] == "step":  # of both processes' blocks, too
            assert a["by_slot"] == pytest.approx(b["by_slot"], rel=1e-3)
    weights = [
        load_checkpoint(list_checkpoints(tmp_path / name / "checkpoints")[-1])[1]
        for name in ("one", "two")
    ]
    for name, value in weights[0].items():
        if name.startswith("model."):
            assert mx.allclose(value, weights[1][name], atol=1e-3).item(), name
