"""The routes that answer with text: each file reads, plans and answers the requests of one, or is what they share."""
