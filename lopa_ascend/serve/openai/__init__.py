"""OpenAI's routes: each file reads, plans and answers the requests of one route."""
