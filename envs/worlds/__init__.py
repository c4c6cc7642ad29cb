"""The environments that come with the package. They are reached by entry points alone."""
