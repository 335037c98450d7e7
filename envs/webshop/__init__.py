"""WebShop: a re-implementation with exactly the original's behaviour."""
