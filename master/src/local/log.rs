//! The log of a worker: its size, and its last lines.

use std::convert::Infallible;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::worker_output;

/// The last lines of the log at `path` without control characters; `None` if it has none.
pub(super) fn last_lines(path: &Path) -> Option<String> {
    // An unreadable log must not prevent the report of the process's end.
    let bytes = read_end(path).ok()?;
    worker_output::last_lines(&String::from_utf8_lossy(&bytes))
}

fn read_end(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(BYTES_MAX)))?;
    let mut bytes = Vec::new();
    file.take(BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens an empty log at `path`. Each write goes to its end, also after it was moved away.
pub(super) fn create(path: &Path) -> io::Result<File> {
    // The output of a program may be confidential.
    File::options().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    File::options().append(true).open(path)
}

/// Moves what the log at `path` has to `path` with `.1` at its end, whenever the log has become
/// long: a program that prints without end does not fill the disk.
pub(super) async fn keep_short(path: &Path) -> Infallible {
    let mut moving: Option<JoinHandle<io::Result<()>>> = None;
    loop {
        tokio::time::sleep(LENGTH_INTERVAL).await;
        let is_long = path.metadata().is_ok_and(|file| file.len() >= LOG_BYTES_MAX);
        if is_long && moving.as_ref().is_none_or(JoinHandle::is_finished) {
            let path = path.to_owned();
            // A log that can't be moved, or for which there is no thread, is looked at again.
            moving = Builder::new().spawn(move || shorten(&path, LOG_BYTES_MAX)).ok();
        }
    }
}

/// The process goes on with the same file, so its content is copied.
fn shorten(path: &Path, bytes_max: u64) -> io::Result<()> {
    if path.metadata()?.len() < bytes_max {
        return Ok(());
    }
    let mut earlier = path.as_os_str().to_owned();
    earlier.push(".1");
    // On a full disk the content is lost.
    let copied = fs::copy(path, earlier);
    File::options().write(true).open(path)?.set_len(0)?;
    copied.map(drop)
}

const BYTES_MAX: u64 = 4096;
/// Interval between looks at the length of a log.
const LENGTH_INTERVAL: Duration = Duration::from_secs(2);
/// Length at which a log is moved away. The help of `--job-dir` has it.
const LOG_BYTES_MAX: u64 = 32 << 20;

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::worker_output::{LAST_LINE_BYTES_MAX, LAST_LINES_MAX};

    fn of(text: &[u8]) -> Option<String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, text).unwrap();
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
        assert_eq!((told.lines().count(), told.lines().last()), (LAST_LINES_MAX, Some("line 999")));
        let long = of("ü".repeat(5000).as_bytes()).unwrap();
        assert!(long.len() <= LAST_LINE_BYTES_MAX + 4 && long.ends_with('…'), "{long}");
    }
    #[test]
    fn a_long_log_is_moved_away_and_its_writer_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("worker-1.log");
        let mut log = create(&path).unwrap();
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap_or_default();
        log.write_all(b"one\n").unwrap();
        shorten(&path, 5).unwrap();
        log.write_all(b"two\n").unwrap();
        shorten(&path, 5).unwrap();
        log.write_all(b"three\n").unwrap();
        assert_eq!(
            (read("worker-1.log"), read("worker-1.log.1")),
            ("three\n".into(), "one\ntwo\n".into())
        );
    }
}
