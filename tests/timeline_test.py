"""The picture of a rollout."""

from gigpo_jax import timeline


def test_a_picture_of_what_slots_did(tmp_path):
  spans = [(0, 'prefill', 5.0, 5.5), (0, 'decode', 5.5, 7.0)]
  spans += [(3, 'decode', 6.0, 6.5)]
  path = timeline.plot(spans, [(4.0, 6.5)], tmp_path)
  assert path == tmp_path / 'rollout_timeline.png'
  assert path.read_bytes().startswith(b'\x89PNG')
  assert timeline.plot([], [], tmp_path / 'none') is None


def test_time_that_any_span_covers():
  assert list(timeline.joined([])) == []
  spans = [(4, 5), (0, 2), (1, 3), (5, 6), (1, 2)]
  assert list(timeline.joined(spans)) == [(0, 3), (4, 6)]
