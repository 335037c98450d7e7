"""WebShop: an online shop in text, its products, goals and rewards."""
