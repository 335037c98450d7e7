"""Tests of the gated delta rule: by hand, and against a slow recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gigpo_jax.models import delta_rule

RULES = {
  'scan': delta_rule.scan,
  **{
    f'chunk {n}': lambda *args, n=n: delta_rule.by_chunks(*args, chunk=n)
    for n in (1, 2, 5, 16, 64)
  },
}


def _tokens(seed: int, b=2, length=37, k=2, r=3, e=4, v=5) -> delta_rule.Tokens:
  """Returns random tokens; in each row, several texts start."""
  rng = np.random.default_rng(seed)
  keys = rng.normal(size=(b, length, k, e))
  arrays = (
    rng.normal(size=(b, length, k, e)),
    keys / np.linalg.norm(keys, axis=-1, keepdims=True),
    rng.normal(size=(b, length, k, r, v)),
    -2 * rng.random((b, length, k, r)),
    rng.random((b, length, k, r)),
  )
  starts = rng.random((b, length)) < 0.1
  return delta_rule.Tokens(
    *(jnp.asarray(x, jnp.float32) for x in arrays), jnp.asarray(starts)
  )


def _state(seed: int, tokens: delta_rule.Tokens) -> jax.Array:
  shape = delta_rule.zero_state(tokens).shape
  values = np.random.default_rng(seed + 100).normal(size=shape)
  return jnp.asarray(values, jnp.float32)


def _slow(tokens: delta_rule.Tokens, state) -> tuple[np.ndarray, np.ndarray]:
  """Computes S_t = exp(g) (I - b k k^T) S_{t-1} + b k v^T for each head."""
  q, k, v, g, rate, starts = (np.asarray(x, np.float64) for x in tokens)
  state, out = np.array(state, np.float64), np.zeros(v.shape)
  for b, t in np.ndindex(*starts.shape):
    if starts[b, t]:
      state[b] = 0
    for h, r in np.ndindex(*g.shape[2:]):
      at, key = (b, t, h, r), k[b, t, h]
      keep = np.eye(len(key)) - rate[at] * np.outer(key, key)
      state[b, h, r] = np.exp(g[at]) * keep @ state[b, h, r]
      state[b, h, r] += rate[at] * np.outer(key, v[at])
      out[at] = q[b, t, h] @ state[b, h, r]
  return out, state


@pytest.mark.parametrize('name', RULES)
def test_two_tokens_by_hand(name):
  # S_1 = k_1 (2 / 2) = (1, 0), and o_1 = (1, 1) . S_1 = 1.
  # The decay halves S to (0.5, 0), which predicts 0.6 / 2 = 0.3 for k_2.
  # S_2 = (0.5, 0) + k_2 (1 - 0.3) = (0.92, 0.56), and o_2 = (0, 1) . S_2.
  tokens = delta_rule.Tokens(
    q=jnp.array([[1.0, 1.0], [0.0, 1.0]]).reshape(1, 2, 1, 2),
    k=jnp.array([[1.0, 0.0], [0.6, 0.8]]).reshape(1, 2, 1, 2),
    v=jnp.array([2.0, 1.0]).reshape(1, 2, 1, 1, 1),
    log_decay=jnp.log(jnp.array([1.0, 0.5])).reshape(1, 2, 1, 1),
    rate=jnp.array([0.5, 1.0]).reshape(1, 2, 1, 1),
    starts=jnp.array([[True, False]]),
  )
  # The text starts at the first token, so it does not see this state.
  out, state = RULES[name](tokens, 7 + delta_rule.zero_state(tokens))
  np.testing.assert_allclose(out.ravel(), [1.0, 0.56], atol=1e-6)
  np.testing.assert_allclose(state.ravel(), [0.92, 0.56], atol=1e-6)


@pytest.mark.parametrize('seed', range(2))
@pytest.mark.parametrize('name', RULES)
def test_rules_equal_a_slow_recurrence(name, seed):
  tokens = _tokens(seed)
  state = _state(seed, tokens)
  for actual, expected in zip(
    jax.jit(RULES[name])(tokens, state), _slow(tokens, state), strict=True
  ):
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_gradients_of_chunks_equal_those_of_single_tokens():
  tokens = _tokens(3)

  def gradients(rule) -> tuple:
    def loss(arrays: tuple, state: jax.Array) -> jax.Array:
      out, state = rule(delta_rule.Tokens(*arrays, tokens.starts), state)
      return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.square(state))

    run = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return run(tuple(tokens[:-1]), _state(3, tokens))

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
    gradients(RULES['chunk 16']),
    gradients(delta_rule.scan),
  )


def test_equal_keys_do_not_overflow():
  # With b = 1 and no decay, each token replaces the value of the key. Sums of
  # powers of the triangular system would have terms up to 1e18.
  tokens = _tokens(0, length=64)._replace(
    k=jnp.zeros((2, 64, 2, 4)).at[..., 0].set(1.0),
    q=jnp.zeros((2, 64, 2, 4)).at[..., 0].set(1.0),
    log_decay=jnp.zeros((2, 64, 2, 3)),
    rate=jnp.ones((2, 64, 2, 3)),
  )
  out, _ = delta_rule.by_chunks(tokens, delta_rule.zero_state(tokens))
  np.testing.assert_allclose(out, tokens.v, atol=1e-5)


def test_division_into_calls_changes_no_bit():
  tokens = _tokens(1)
  whole, end = delta_rule.scan(tokens, _state(1, tokens))
  state, parts = _state(1, tokens), []
  for first, last in ((0, 5), (5, 20), (20, 37)):
    part = delta_rule.Tokens(*(x[:, first:last] for x in tokens))
    out, state = delta_rule.scan(part, state)
    parts.append(out)
  np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
  np.testing.assert_array_equal(state, end)
