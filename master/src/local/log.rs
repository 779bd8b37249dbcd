//! The last lines of a worker's log.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;

/// The last lines of the log at `path` without control characters; `None` if it has none.
pub(super) fn last_lines(path: &Path) -> Option<String> {
    // An unreadable log must not prevent the report of the process's end.
    let bytes = read_end(path).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let printed: Vec<String> =
        text.lines().map(plain).filter(|line| !line.trim().is_empty()).collect();
    let last = printed[printed.len().saturating_sub(LINES_MAX)..].join("\n");
    (!last.is_empty()).then_some(last)
}

fn read_end(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(BYTES_MAX)))?;
    let mut bytes = Vec::new();
    file.take(BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// `line` without escape sequences and other control characters, truncated.
fn plain(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line.chars();
    while let Some(c) = rest.next() {
        match c {
            // An escape sequence such as `ESC [ 31 m` ends with a letter.
            '\u{1b}' => drop(rest.by_ref().find(char::is_ascii_alphabetic)),
            '\t' => text.push(' '),
            c if c.is_control() => {}
            c => text.push(c),
        }
        if text.len() >= LINE_BYTES_MAX {
            text.push('…');
            break;
        }
    }
    text.trim_end().to_owned()
}

const BYTES_MAX: u64 = 4096;
const LINES_MAX: usize = 8;
const LINE_BYTES_MAX: usize = 160;

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &[u8]) -> Option<String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, text).unwrap();
        last_lines(file.path())
    }

    #[test]
    fn the_last_lines_contain_no_escape_sequences() {
        assert_eq!(of(b""), None);
        assert_eq!(of(b"\n \n\x1b[0m\n"), None);
        assert_eq!(last_lines(Path::new("/nowhere/log")), None);
        let text = b"a\tb\n\n\x1b[1m\x1b[31merror:\x1b[0m no such option\x07\r\n  \xff!\n";
        assert_eq!(of(text).unwrap(), "a b\nerror: no such option\n  \u{fffd}!");
        let many: String = (0..1000).map(|i| format!("line {i}\n")).collect();
        let told = of(many.as_bytes()).unwrap();
        assert_eq!((told.lines().count(), told.lines().last()), (LINES_MAX, Some("line 999")));
        let long = of("ü".repeat(5000).as_bytes()).unwrap();
        assert!(long.len() <= LINE_BYTES_MAX + 4 && long.ends_with('…'), "{long}");
    }
}
