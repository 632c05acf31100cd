"""What a client asks for: checked, converted, defaults filled in."""
