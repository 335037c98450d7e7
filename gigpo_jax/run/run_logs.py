"""What a run writes for people: metrics, console lines and episodes."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gigpo_jax import (
  algorithms,
  batch,
  group_filter,
  metrics,
  rollout,
  teacher,
)
from gigpo_jax.runtime import console
from gigpo_jax.tools import timeline

if TYPE_CHECKING:
  from gigpo_jax import episodes


@dataclasses.dataclass(frozen=True)
class RunLogs:
  """The logs of a run.

  Attributes:
    writer: writes metrics; a `NullWriter` in all but the main process.
    episode_writer: writes training episodes; None if they are not kept, and in
      all but the main process.
    teacher_writer: the same for the rows of a teacher.
    folder: folder for pictures; None in all but the main process.
  """

  writer: metrics.Writer | metrics.NullWriter
  episode_writer: 'episodes.EpisodeWriter | None' = None
  teacher_writer: 'episodes.EpisodeWriter | None' = None
  folder: pathlib.Path | None = None

  def write(self, iteration: int, values: dict[str, float]) -> None:
    """Writes the metrics of an iteration and prints a line."""
    self.writer.write(iteration, values)
    console.log(metrics.console_line(iteration, values))

  def write_episodes(
    self,
    iteration: int,
    groups: group_filter.CollectedGroups,
    rows: batch.Rows | None = None,
    output: algorithms.AlgorithmOutput | None = None,
  ) -> dict[str, float]:
    """Writes the episodes of an iteration; returns metrics.

    Args:
      iteration: index of the iteration.
      groups: the episodes.
      rows: the rows of `groups.kept` that are trained on; others are padding.
        None if no episode is kept.
      output: the advantages of the rows.
    """
    if self.episode_writer is None:
      return {}
    return self.episode_writer.write(iteration, groups, rows, output)

  def write_teacher(
    self, iteration: int, teacher_batch: teacher.TeacherBatch | None
  ) -> None:
    """Writes the rows of a teacher in an iteration, if it has any."""
    if self.teacher_writer is not None and teacher_batch is not None:
      self.teacher_writer.write_teacher(
        iteration, teacher_batch.rows, teacher_batch.columns
      )

  def plot_rollout(self, runner: rollout.EpisodeRunner) -> None:
    """Draws the timeline of the last rollout."""
    if self.folder:
      spans = runner.stats.spans, runner.clock.env_spans
      timeline.plot(*spans, self.folder)

  def close(self) -> None:
    """Closes the files of metrics."""
    self.writer.close()


@contextlib.contextmanager
def timed(values: dict[str, float], name: str) -> Iterator[None]:
  """Adds the duration of the context, in seconds, to metrics."""
  start = time.monotonic()
  yield
  values[name] = time.monotonic() - start
