"""Print the table of methods and options, docs/methods.md."""

from gigpo_jax.tools import method_table

if __name__ == '__main__':
  print(method_table.page(), end='')
