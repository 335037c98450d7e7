"""The picture of a rollout."""

from gigpo_jax import timeline


def test_a_picture_of_what_slots_did(tmp_path):
  spans = [(0, 'prefill', 5.0, 5.5), (0, 'decode', 5.5, 7.0)]
  spans += [(3, 'decode', 6.0, 6.5)]
  path = timeline.plot(spans, tmp_path)
  assert path == tmp_path / 'rollout_timeline.png'
  assert path.read_bytes().startswith(b'\x89PNG')
  assert timeline.plot([], tmp_path / 'none') is None
