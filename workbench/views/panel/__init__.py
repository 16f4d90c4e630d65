"""The panel in the browser: one widget, a script per section."""
