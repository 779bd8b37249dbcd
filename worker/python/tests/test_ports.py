"""Test that the table of the README is what `.bench/ports --lines` prints."""

import sys
import unittest

from jobs import HERE

sys.path.append(str(HERE.parent / "bench"))
import ports


class Table(unittest.TestCase):
    def test_the_readme_has_the_lines_of_the_patches(self):
        self.assertIn(ports.table(), (HERE.parent / "README.md").read_text())


if __name__ == "__main__":
    unittest.main()
