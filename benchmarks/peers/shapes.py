"""Shapes, inputs and timing that all frameworks share; needs NumPy alone."""

import dataclasses
import json
import os
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np

PROMPT = 256
NEW = 64


@dataclasses.dataclass(frozen=True)
class Shape:
  """Shape of a decoder with the architecture of Qwen2.

  Attributes:
    name: name of the shape.
    num_layers: number of layers.
    d_model: width.
    d_ff: width of the feed-forward layers.
    num_heads: query heads.
    num_kv_heads: key and value heads.
    head_dim: width of a head.
    vocab: number of tokens.
    tied: whether the output shares the embedding.
    rope_theta: base of the rotary embedding.
    norm_eps: added to the variance in norms.
  """

  name: str
  num_layers: int
  d_model: int
  d_ff: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  vocab: int
  tied: bool = True
  rope_theta: int = 1_000_000
  norm_eps: float = 1e-6


SHAPES = {
  # So small that overheads dominate.
  'tiny': Shape('tiny', 4, 256, 1024, 4, 2, 64, 4096),
  # Widths and vocabulary of Qwen2.5-0.5B, four layers.
  'qwen05b_4l': Shape('qwen05b_4l', 4, 896, 4864, 14, 2, 64, 151936),
}


def prompts(shape: Shape, batch: int, length: int = PROMPT) -> np.ndarray:
  """Returns token ids without the reserved ones, 0 and the last."""
  rng = np.random.default_rng(0)
  return rng.integers(2, shape.vocab - 1, size=(batch, length), dtype=np.int32)


class Runs(list):
  """Wall seconds of each repeat; `cpu` has the process's CPU seconds."""

  def __init__(self):
    super().__init__()
    self.cpu: list[float] = []

  def add(self, wall: float, cpu: float) -> None:
    """Adds a repeat."""
    self.append(wall)
    self.cpu.append(cpu)


def timed(
  run: Callable[[], object], repeats: int, warmup: int = 1
) -> tuple[Runs, Runs]:
  """Returns the times of the warm-up and of the repeats; `run` blocks."""
  warm, runs = Runs(), Runs()
  for times, count in ((warm, warmup), (runs, repeats)):
    for _ in range(count):
      wall, cpu = time.perf_counter(), time.process_time()
      run()
      times.add(time.perf_counter() - wall, time.process_time() - cpu)
  return warm, runs


def rates(
  row: dict,
  batch: int,
  prompt: int,
  new: int,
  full: Runs,
  prefill: Runs | None = None,
) -> dict:
  """Returns the row with medians and tokens per second, wall and CPU."""
  row = row | {'repeats': len(full)}
  for tag, runs, first in (
    ('wall', full, prefill),
    ('cpu', full.cpu, prefill.cpu if prefill else None),
  ):
    median = statistics.median(runs)
    row[f'{tag}_s'] = round(median, 4)
    row[f'{tag}_min_s'] = round(min(runs), 4)
    row[f'{tag}_max_s'] = round(max(runs), 4)
    if first is None:
      row[f'train_tok_per_{tag}_s'] = round(batch * (prompt + new) / median, 1)
      continue
    one = statistics.median(first)
    decoding = max(median - one, 1e-9)
    row[f'prefill_{tag}_s'] = round(one, 4)
    row[f'new_tok_per_{tag}_s'] = round(batch * new / median, 1)
    row[f'prefill_tok_per_{tag}_s'] = round(batch * prompt / one, 1)
    row[f'decode_tok_per_{tag}_s'] = round(batch * (new - 1) / decoding, 1)
  return row


def warm_fields(warm: Runs) -> dict[str, float]:
  """Returns the seconds of the first call."""
  return {
    'warmup_wall_s': round(warm[0], 2),
    'warmup_cpu_s': round(warm.cpu[0], 2),
  }


def emit(**row) -> None:
  """Prints a row as JSON and appends it to the file $BENCH_OUT."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  line = json.dumps({'peak_rss_gib': round(peak, 2)} | row)
  print(line, flush=True)
  if out := os.environ.get('BENCH_OUT'):
    with open(out, 'a') as file:
      file.write(line + '\n')
