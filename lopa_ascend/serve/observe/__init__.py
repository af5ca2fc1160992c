"""What operators read: metrics and the times of each request."""
