"""What sparse attention keeps and what it leaves out, layer by layer and head by head."""
