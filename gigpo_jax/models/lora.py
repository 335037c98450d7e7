"""Low-rank adapters of a frozen network (arXiv:2106.09685).

y = W x + (alpha / rank) b (a x). A matrix NAME of a layer has its adapter's two
beside it, as NAME_a [N, inputs.., R] and NAME_b [N, R, outputs..].
"""

import dataclasses

TARGETS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')

# Ends of the names of an adapter's matrices.
A, B = '_a', '_b'


@dataclasses.dataclass(frozen=True)
class Lora:
  """Shape of the adapters.

  Attributes:
    rank: of a product b a.
    alpha: its weight, times the rank.
    targets: which matrices have one, of TARGETS.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...] = TARGETS

  @property
  def scale(self) -> float:
    """Weight of b (a x)."""
    return self.alpha / self.rank


def split(params: dict) -> tuple[dict, dict]:
  """Returns the adapters, and the rest: trees of the same form."""
  adapters, rest = {}, {}
  for name, leaf in params.items():
    if isinstance(leaf, dict):
      inner, outer = split(leaf)
      adapters |= {name: inner} if inner else {}
      rest |= {name: outer} if outer else {}
    elif name.endswith((A, B)):
      adapters[name] = leaf
    else:
      rest[name] = leaf
  return adapters, rest


def join(one: dict, other: dict) -> dict:
  """Returns a tree with the leaves of both."""
  found = dict(one)
  for name, leaf in other.items():
    found[name] = join(one[name], leaf) if name in one else leaf
  return found


def merge(lora: Lora, params: dict) -> dict:
  """Returns parameters without adapters, which their matrices have taken in.

  Added up in float32; a matrix keeps its type.
  """
  found = {}
  for name, leaf in params.items():
    if isinstance(leaf, dict):
      found[name] = merge(lora, leaf)
    elif name + A in params:
      a, b = params[name + A], params[name + B]
      layers, rank = a.shape[0], lora.rank
      product = a.reshape(layers, -1, rank) @ b.reshape(layers, rank, -1)
      merged = leaf + lora.scale * product.reshape(leaf.shape)
      found[name] = merged.astype(leaf.dtype)
    elif not name.endswith((A, B)):
      found[name] = leaf
  return found
