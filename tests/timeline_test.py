"""Tests of the rollout timeline."""

import pytest
from matplotlib import pyplot

from gigpo_jax.tools import timeline


def test_plot_writes_png(tmp_path):
  spans = [(0, 'prefill', 5.0, 5.5), (0, 'decode', 5.5, 7.0)]
  spans += [(3, 'decode', 6.0, 6.5)]
  path = timeline.plot(spans, [(4.0, 6.5)], tmp_path)
  assert path == tmp_path / 'rollout_timeline.png'
  assert path.read_bytes().startswith(b'\x89PNG')
  assert timeline.plot([], [], tmp_path / 'none') is None


def test_overlapping_spans_are_merged():
  assert list(timeline.merge_spans([])) == []
  spans = [(4, 5), (0, 2), (1, 3), (5, 6), (1, 2)]
  assert list(timeline.merge_spans(spans)) == [(0, 3), (4, 6)]


@pytest.mark.parametrize('slots', [1, 2, 3, 40])
def test_slot_ticks_are_integers(tmp_path, monkeypatch, slots):
  drawn = []
  monkeypatch.setattr(pyplot, 'close', drawn.append)
  spans = [(slot, 'decode', 0.0, 1.0) for slot in range(slots)]
  timeline.plot(spans, [], tmp_path)
  (axes,) = drawn[0].axes
  monkeypatch.undo()
  pyplot.close(drawn[0])
  high, low = axes.get_ylim()
  marks = [tick for tick in axes.get_yticks() if low <= tick <= high]
  assert marks
  assert set(marks) <= set(range(slots))
