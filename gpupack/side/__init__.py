"""What goes beside the rows of a frame: opening records, columns that only the host has, and the room for them."""
