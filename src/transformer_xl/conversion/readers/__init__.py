"""Files of foreign formats, read as data: nothing in them is imported, called or executed."""
