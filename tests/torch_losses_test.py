"""Losses and optimizer compared with PyTorch, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gigpo_jax import losses, optimizer, token_batch

torch = pytest.importorskip('torch')

ROWS, LENGTH = 5, 4


def random_inputs(seed):
  """Returns arrays [1, T] of five rows of up to four tokens, by name."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(1, LENGTH + 1, ROWS)
  row_ids = np.repeat(np.arange(ROWS), lengths)
  size = len(row_ids)
  old = rng.normal(-1.5, 0.4, size)
  arrays = {
    'log_probs': old + rng.normal(0, 0.3, size),
    'entropies': rng.uniform(0.1, 2, size),
    'old_log_probs': old,
    'ref_log_probs': old + rng.normal(0, 0.5, size),
    'advantages': rng.normal(size=ROWS)[row_ids],
    'importance': rng.uniform(0.5, 2, size),
  }
  arrays = {k: np.float32(x)[None] for k, x in arrays.items()}
  return arrays, row_ids, lengths


def torch_loss(arrays, row_ids, lengths, o):
  """Returns verl's loss of a batch, written with padded rows, as a scalar."""
  lines = {
    name: torch.nn.utils.rnn.pad_sequence(
      torch.split(x[0], lengths.tolist()), batch_first=True
    )
    for name, x in arrays.items()
  }
  mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
  new, old = lines['log_probs'], lines['old_log_probs']
  gap = new - old
  if o['ratio_level'] == 'row':
    mean = (gap * mask).sum(1) / mask.sum(1)
    gap = new - new.detach() + mean.detach()[:, None]
  ratio = gap.exp()
  weighted = lines['advantages'] * lines['importance']
  low, high = 1 - o['clip_epsilon'], 1 + o['clip_epsilon_high']
  if o['surrogate'] == 'cispo':
    loss = -ratio.clamp(low, high).detach() * weighted * new
  else:
    loss = torch.maximum(-weighted * ratio, -weighted * ratio.clamp(low, high))
    if o['dual_clip']:
      bounded = torch.minimum(-weighted * o['dual_clip'], loss)
      loss = torch.where(weighted < 0, bounded, loss)
  d = lines['ref_log_probs'] - new
  kl = {'k2': d**2 / 2, 'k3': d.exp() - d - 1, 'abs': d.abs()}
  kl = kl[o['kl_estimator']]
  if o['kl_clamp']:
    kl = kl.clamp(max=o['kl_clamp'])
  loss = loss + o['kl_weight'] * o['kl_factor'] * kl
  loss = loss - o['entropy_weight'] * lines['entropies']
  loss = torch.where(mask, loss, 0)
  return {
    'token_mean': loss.sum() / mask.sum(),
    'sequence_mean': (loss.sum(1) / mask.sum(1)).mean(),
    'sequence_sum': loss.sum(1).mean(),
    'fixed_length': (loss.sum(1) / LENGTH).mean(),
  }[o['aggregation']]


DEFAULTS = {
  'surrogate': 'clipped',
  'ratio_level': 'token',
  'clip_epsilon': 0.2,
  'clip_epsilon_high': 0.28,
  'dual_clip': None,
  'kl_weight': 0.5,
  'kl_estimator': 'k3',
  'kl_clamp': None,
  'kl_factor': 1.0,
  'entropy_weight': 0.01,
  'aggregation': 'token_mean',
}


@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'aggregation': 'sequence_mean', 'dual_clip': 1.5},
    {'aggregation': 'sequence_sum', 'kl_estimator': 'abs'},
    {'aggregation': 'fixed_length', 'kl_estimator': 'k2'},
    {'kl_estimator': 'k2', 'kl_clamp': 0.1, 'kl_factor': 3.0},
    {'surrogate': 'cispo', 'clip_epsilon': 1.0},
    {'surrogate': 'cispo', 'ratio_level': 'row'},
    {'ratio_level': 'row', 'clip_epsilon': 0.05, 'clip_epsilon_high': 0.05},
  ],
  ids=str,
)
def test_losses_and_gradients_match_torch(changes):
  o = DEFAULTS | changes
  own = {k: v for k, v in o.items() if k not in ('aggregation', 'kl_factor')}
  loss = losses.PolicyGradient(**own, kl_target=0.1)
  for seed in range(3):
    arrays, row_ids, lengths = random_inputs(seed)
    weights = losses.row_weights(lengths, LENGTH, o['aggregation'])[row_ids]

    def total(log_probs, entropies, arrays=arrays, ids=row_ids, w=weights):
      columns = {k: arrays.get(k, o['kl_factor']) for k in loss.columns}
      columns = {
        k: jnp.broadcast_to(x, ids[None].shape) for k, x in columns.items()
      }
      tokens = token_batch.make(
        jnp.ones(ids[None].shape, bool), jnp.asarray(ids[None]), columns
      )
      outputs = token_batch.PolicyOutputs(log_probs, entropies)
      return jnp.sum(loss(outputs, tokens)[0] * w)

    actual = jax.jit(jax.value_and_grad(total, (0, 1)))(
      jnp.asarray(arrays['log_probs']), jnp.asarray(arrays['entropies'])
    )
    tensors = {k: torch.tensor(x) for k, x in arrays.items()}
    for name in ('log_probs', 'entropies'):
      tensors[name].requires_grad_()
    expected = torch_loss(tensors, row_ids, lengths, o)
    expected.backward()
    np.testing.assert_allclose(actual[0], expected.item(), atol=2e-6)
    for gradient, name in zip(
      actual[1], ('log_probs', 'entropies'), strict=True
    ):
      np.testing.assert_allclose(gradient, tensors[name].grad, atol=2e-6)


def test_row_regression_and_its_gradient_match_torch():
  loss = losses.make('row_regression', log_ratio_weight=0.3)
  for seed in range(3):
    arrays, row_ids, lengths = random_inputs(seed)
    weights = losses.row_weights(lengths, LENGTH, 'sequence_mean')[row_ids]
    columns = {k: jnp.asarray(arrays[k]) for k in loss.columns}
    tokens = token_batch.make(
      jnp.ones_like(columns['advantages'], bool),
      jnp.asarray(row_ids[None]),
      columns,
    )

    def total(log_probs, tokens=tokens, w=weights):
      outputs = token_batch.PolicyOutputs(log_probs, log_probs)
      return jnp.sum(loss(outputs, tokens)[0] * w)

    actual = jax.jit(jax.value_and_grad(total))(
      jnp.asarray(arrays['log_probs'])
    )
    new = torch.tensor(arrays['log_probs'][0], requires_grad=True)
    gaps = (new - torch.tensor(arrays['ref_log_probs'][0])).split(
      lengths.tolist()
    )
    starts = np.cumsum(lengths) - lengths
    errors = [
      0.3 * gap.sum() - float(arrays['advantages'][0, start])
      for gap, start in zip(gaps, starts, strict=True)
    ]
    expected = sum(error**2 for error in errors) / ROWS
    expected.backward()
    np.testing.assert_allclose(actual[0], expected.item(), rtol=2e-6)
    np.testing.assert_allclose(actual[1][0], new.grad, atol=2e-6)


def test_entropy_band_and_its_gradient_match_torch():
  band = losses.EntropyBand(weight=0.7, low=0.9, high=1.1, decay=2.0)
  for seed in range(3):
    rng = np.random.default_rng(seed)
    past, k, count = [*rng.uniform(0.5, 1.5, 4)], 4, 9
    columns = {
      name: jnp.full((2, 5), value)
      for name, value in band.make_columns(past, k, count).items()
    }
    mask = rng.random((2, 5)) < 0.8
    ids = jnp.zeros((2, 5), jnp.int32)
    tokens = token_batch.make(jnp.asarray(mask), ids, columns)
    entropies = rng.uniform(0.2, 2, (2, 5)).astype(np.float32)
    actual, gradient = jax.value_and_grad(
      lambda x, t=tokens: band.penalty(x, t).sum()
    )(jnp.asarray(entropies))
    h = torch.tensor(entropies, requires_grad=True)
    mean, beta = np.mean(past), 1 + np.exp(-2.0 * k / 4)
    outside = torch.relu(0.9 * mean - h) + torch.relu(h - 1.1 * mean)
    expected = (0.7 * beta * outside)[torch.tensor(mask)].sum()
    expected.backward()
    assert expected > 0.1
    np.testing.assert_allclose(actual, expected.item(), rtol=2e-6)
    np.testing.assert_allclose(gradient, h.grad, atol=2e-6)


@pytest.mark.parametrize('decay', ['linear', 'cosine'])
@pytest.mark.parametrize('final_rate', [0.0, 0.1])
def test_schedules_match_torch(decay, final_rate):
  updates, base = 12, 3e-4
  adamw = optimizer.AdamW(
    base, decay=decay, decay_updates=updates, final_rate=final_rate
  )
  parameter = torch.nn.Parameter(torch.zeros(1))
  other = torch.optim.SGD([parameter], lr=base)
  schedules = torch.optim.lr_scheduler
  if decay == 'cosine':
    schedule = schedules.CosineAnnealingLR(
      other, updates, eta_min=final_rate * base
    )
  else:
    schedule = schedules.LinearLR(
      other, start_factor=1.0, end_factor=final_rate, total_iters=updates
    )
  for k in range(updates + 1):
    rate = float(adamw.schedule(jnp.asarray(k)))
    np.testing.assert_allclose(rate, other.param_groups[0]['lr'], atol=1e-10)
    other.step()
    schedule.step()


def test_adamw_matches_torch():
  rng = np.random.default_rng(0)
  params = {'dense': rng.normal(size=(3, 2)), 'norm': rng.normal(size=2)}
  options = {'eps': 1e-3, 'weight_decay': 0.3, 'b1': 0.8, 'b2': 0.95}
  adamw = optimizer.AdamW(
    0.05,
    warmup_ratio=0.25,
    decay_updates=8,
    decay='cosine',
    final_rate=0.2,
    no_decay=('norm',),
    max_grad_norm=0.7,
    **options,
  )
  ours = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
  theirs = {k: torch.nn.Parameter(torch.tensor(x)) for k, x in params.items()}
  other = torch.optim.AdamW(
    [
      {'params': [theirs['dense']]},
      {'params': [theirs['norm']], 'weight_decay': 0.0},
    ],
    lr=0.05,
    betas=(0.8, 0.95),
    eps=1e-3,
    weight_decay=0.3,
  )

  def scale(k):
    # The warm-up takes 2 of 8 updates; then half a cosine to a fifth.
    if k < 2:
      return (k + 1) / 2
    cosine = (1 + np.cos(np.pi * min((k - 2) / 6, 1))) / 2
    return 0.2 + 0.8 * cosine

  schedule = torch.optim.lr_scheduler.LambdaLR(other, scale)
  ours_transform = adamw.make()
  state = ours_transform.init(ours)
  for _ in range(10):
    gradients = {k: rng.normal(size=x.shape) for k, x in params.items()}
    changes, state = ours_transform.update(
      jax.tree.map(jnp.float32, gradients), state, ours
    )
    ours = jax.tree.map(jnp.add, ours, changes)
    for k, x in theirs.items():
      x.grad = torch.tensor(gradients[k])
    torch.nn.utils.clip_grad_norm_(theirs.values(), 0.7)
    other.step()
    schedule.step()
  for k, x in theirs.items():
    np.testing.assert_allclose(ours[k], x.detach(), atol=1e-5)
