"""The database of a case: a few SQLite tables in memory.

A database is created from rows and compared by its rows, so a state needs no
file and no identity beyond its contents.
"""

import sqlite3
from collections.abc import Mapping, Sequence

Row = tuple[str | int, ...]
Tables = Mapping[str, Sequence[Row]]

# Columns of each table. An order has one product. `days` counts the days since
# the delivery; `note` is the reason of a cancellation.
COLUMNS = {
  'users': ('user_id', 'name', 'zip_code', 'credit'),
  'products': ('product_id', 'name', 'option', 'price', 'stock'),
  'orders': (
    'order_id',
    'user_id',
    'product_id',
    'status',
    'days',
    'address',
    'note',
  ),
  'outcomes': ('outcome',),
}


class Database:
  """The tables of an episode.

  Args:
    tables: rows by table; missing tables are empty.
  """

  def __init__(self, tables: Tables):
    self._connection = sqlite3.connect(':memory:', isolation_level=None)
    for table, columns in COLUMNS.items():
      self._connection.execute(f'CREATE TABLE {table} ({", ".join(columns)})')
      marks = ', '.join('?' * len(columns))
      self._connection.executemany(
        f'INSERT INTO {table} VALUES ({marks})', tables.get(table, ())
      )

  def find(self, table: str, **wanted: str | int) -> list[dict[str, str | int]]:
    """Returns the rows whose columns have the given values, in order."""
    where = ' AND '.join(f'{column} = ?' for column in wanted) or '1'
    rows = self._connection.execute(
      f'SELECT * FROM {table} WHERE {where} ORDER BY 1', tuple(wanted.values())
    )
    return [dict(zip(COLUMNS[table], row, strict=True)) for row in rows]

  def update(self, table: str, key: str, **values: str | int) -> None:
    """Changes columns of the row with a key, its first column."""
    changes = ', '.join(f'{column} = ?' for column in values)
    self._connection.execute(
      f'UPDATE {table} SET {changes} WHERE {COLUMNS[table][0]} = ?',
      (*values.values(), key),
    )

  def add(self, table: str, row: Row) -> None:
    """Adds a row."""
    marks = ', '.join('?' * len(row))
    self._connection.execute(f'INSERT INTO {table} VALUES ({marks})', row)

  def rows(self) -> frozenset[tuple[str, Row]]:
    """Returns all rows, each with its table: the state."""
    return frozenset(
      (table, tuple(row))
      for table in COLUMNS
      for row in self._connection.execute(f'SELECT * FROM {table}')
    )

  def close(self) -> None:
    """Frees the tables."""
    self._connection.close()
