"""Which keys sparse attention keeps and omits, layer by layer and head by head."""
