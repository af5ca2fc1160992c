"""What several ranks send each other, and how the work of a decode divides among them."""
