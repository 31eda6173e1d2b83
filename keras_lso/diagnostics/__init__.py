"""Reports on overflow and underflow in float16, and a recommendation."""
