"""The methods that come with the package; each file is a plugin, found through its entry point."""
