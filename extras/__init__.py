"""Programs that use the library. Nothing in it imports them."""
