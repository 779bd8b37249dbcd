//! A job's history as it is stored: as JSON in the job's directory, and packed in the anchor of a
//! cluster job, which has little room.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use elasticdl_proto::Status;
use serde::{Deserialize, Serialize};

use super::history::History;

/// A history that was stored, with the newest status.
#[derive(Debug, Default, Deserialize)]
pub struct StoredHistory {
    /// The newest status. Empty in an anchor, which has the status in a key of its own.
    #[serde(default)]
    pub status: Status,
    pub(crate) history: History,
}

/// As [`StoredHistory`], to be written.
#[derive(Serialize)]
struct Stored<'a> {
    format: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'a Status>,
    history: &'a History,
}

impl StoredHistory {
    /// Reads the file at `path`; `None` if there is none.
    ///
    /// # Errors
    /// The file can't be read, or another release has written it in another format.
    pub fn read(path: &Path) -> io::Result<Option<Self>> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        read_limited(file).and_then(|json| Self::parse(&json)).map(Some)
    }

    /// Reads what [`pack`] has made.
    ///
    /// # Errors
    /// As for [`StoredHistory::read`].
    pub(crate) fn unpack(text: &str) -> io::Result<Self> {
        let bytes = STANDARD.decode(text).map_err(invalid)?;
        Self::parse(&read_limited(zstd::stream::Decoder::new(&bytes[..])?)?)
    }

    fn parse(json: &[u8]) -> io::Result<Self> {
        #[derive(Deserialize)]
        struct Head {
            format: u32,
        }
        let head: Head = serde_json::from_slice(json)?;
        if head.format != FORMAT {
            let found = head.format;
            return Err(invalid(format!("it has format {found}, and this release reads {FORMAT}")));
        }
        Ok(serde_json::from_slice(json)?)
    }
}

/// A history as JSON.
pub(super) fn to_json(status: &Status, history: &History) -> Vec<u8> {
    let stored = Stored { format: FORMAT, status: Some(status), history };
    serde_json::to_vec(&stored).expect("its keys are strings")
}

/// A history as a text of at most `bytes` (at least 4 KiB), compressed, and with less resolution
/// where needed.
///
/// # Errors
/// The compression failed.
pub(crate) fn pack(history: &History, bytes: usize) -> io::Result<String> {
    let mut history = history.clone();
    loop {
        let stored = Stored { format: FORMAT, status: None, history: &history };
        let json = serde_json::to_vec(&stored).expect("its keys are strings");
        let text = STANDARD.encode(zstd::encode_all(&*json, COMPRESSION_LEVEL)?);
        if text.len() <= bytes {
            return Ok(text);
        }
        let before = json.len();
        history.halve();
        let after = serde_json::to_vec(&history).map_or(0, |json| json.len());
        if after >= before {
            // A single entry is too long.
            history = History::default();
        }
    }
}

fn read_limited(reader: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader.take(BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn invalid(why: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_string())
}

/// More than the longest history takes.
const BYTES_MAX: u64 = 64 << 20;
const COMPRESSION_LEVEL: i32 = 3;
/// Changed when an older release could not read the history correctly.
const FORMAT: u32 = 1;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::job::testing::spec;
    use crate::job::{Job, Time};

    #[test]
    fn a_long_history_is_packed_within_its_limit_and_keeps_what_is_new() {
        let mut history = History::default();
        for number in 1..20_000_u64 {
            let at = Time(Duration::from_millis(number * 1700));
            let mut seen = Job::new(spec()).snapshot(at);
            seen.status.step = number;
            seen.status.loss = (number % 977 > 0).then(|| 1.0 / (number % 977) as f64);
            seen.status.records_per_s = (number * 7919 % 10_007) as f64;
            seen.status.events = vec![format!("event {number}: {}", number * 7919 % 10_007)];
            seen.status.events_emitted = number;
            history.observe(&seen);
            // A value that is not finite has no JSON form.
            seen.status.loss = Some(f64::INFINITY);
            history.observe(&seen);
        }
        for bytes in [4 << 10, 12 << 10, 128 << 10] {
            let packed = pack(&history, bytes).unwrap();
            assert!(packed.len() <= bytes && packed.len() > 1 << 10, "{}", packed.len());
            let read = StoredHistory::unpack(&packed).unwrap().history;
            assert!(read.events.back().unwrap().text.starts_with("event 19999: "));
            assert_eq!(read.curves.points.last().unwrap().step, 19_999);
            assert!(read.curves.points.len() > 20);
        }
        let whole = StoredHistory::unpack(&pack(&history, 1 << 20).unwrap()).unwrap();
        let steps = |history: &History| -> Vec<(u64, bool)> {
            let points = history.curves.points.iter();
            points.map(|point| (point.step, point.loss.is_some())).collect()
        };
        assert_eq!(steps(&whole.history), steps(&history));
    }

    #[test]
    fn a_history_of_another_format_is_refused_with_the_reason() {
        let error = StoredHistory::parse(br#"{"format":7,"later":1}"#).unwrap_err().to_string();
        assert!(error.contains("format 7"), "{error}");
        assert!(StoredHistory::parse(b"[1").is_err());
        assert!(["", "!", "AAAA"].iter().all(|text| StoredHistory::unpack(text).is_err()));
        assert!(StoredHistory::read(Path::new("/no/such/file")).unwrap().is_none());
    }
}
