"""WebShop: search, compare and buy, to the letter of the original."""
