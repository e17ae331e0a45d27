"""A small Llama trained from scratch on synthetic multi-turn recall, and the task it is trained and measured on."""
