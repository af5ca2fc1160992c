"""Programs that use a server as the clients of other projects do. Each prints one JSON object with what it got."""
