//! What the terminal of a command can do.

use std::ffi::OsStr;
use std::io::IsTerminal;

/// Whether lines on `stream` can be drawn again in place.
pub(crate) fn can_redraw(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && moves_its_cursor(std::env::var_os("TERM").as_deref())
}

/// Whether a terminal of this type moves its cursor. Without a type it is one of a program that
/// only shows text, such as a shell in an editor or a container's console.
fn moves_its_cursor(term: Option<&OsStr>) -> bool {
    term.is_some_and(|term| !term.is_empty() && term != "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_without_a_cursor_shows_lines_as_a_pipe_does() {
        let moves = |term: Option<&str>| moves_its_cursor(term.map(OsStr::new));
        assert_eq!([None, Some(""), Some("dumb")].map(moves), [false; 3]);
        assert_eq!([Some("xterm-256color"), Some("linux"), Some("screen")].map(moves), [true; 3]);
    }
}
