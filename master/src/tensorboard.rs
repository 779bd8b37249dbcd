//! Event files for TensorBoard: scalars over steps.
//!
//! An event file is a row of records, each a length, a checksum of it, an event (a protobuf message
//! of four fields), and a checksum of that. The crates that write them are years old and bring an
//! image library or another protobuf; these are two messages and a checksum, so they are written
//! here.
//!
//! **Invariant:** what can't be written costs the job nothing but these files; it is said once.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message;
use tokio::sync::watch;
use tracing::warn;

use crate::job::{Snapshot, StepTimes};

/// Writes scalars of one job into one file.
#[derive(Debug)]
pub struct EventFile {
    file: File,
    path: PathBuf,
    /// Of the newest point.
    step: Option<u64>,
    times: StepTimes,
    /// Of the newest evaluation.
    evaluated: Option<u64>,
}

impl EventFile {
    /// Begins a file of its own in `folder`, which is made if it is not there.
    ///
    /// # Errors
    /// The system's word.
    pub fn create(folder: &Path, job: &str) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let now = SystemTime::now();
        let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        // TensorBoard looks for `tfevents` in names, and reads files in their order. A master that
        // goes on with a job has another process id.
        let name = format!("events.out.tfevents.{seconds:010}.{job}.{}", std::process::id());
        let path = folder.join(name);
        let mut file = File::create_new(&path)?;
        let version =
            Event { wall_time: wall(now), file_version: Some(VERSION.into()), ..Event::default() };
        file.write_all(&framed(&version.encode_to_vec()))?;
        Ok(Self { file, path, step: None, times: StepTimes::default(), evaluated: None })
    }

    /// Adds a point for the snapshot's step, unless that is the newest point's already, and one for
    /// its evaluation.
    ///
    /// # Errors
    /// The system's word.
    pub fn add(&mut self, now: SystemTime, snapshot: &Snapshot) -> io::Result<()> {
        let status = &snapshot.status;
        if let Some(evaluated) =
            status.evaluated.as_ref().filter(|e| self.evaluated != Some(e.step))
        {
            self.evaluated = Some(evaluated.step);
            let means =
                evaluated.metrics.iter().map(|(name, mean)| (format!("validation/{name}"), *mean));
            self.write(now, evaluated.step, means)?;
        }
        if status.step == 0 || self.step == Some(status.step) {
            return Ok(());
        }
        self.step = Some(status.step);
        let members = status.workers.iter().filter(|worker| worker.rank.is_some()).count();
        let times = snapshot.tally.times;
        let before = std::mem::replace(&mut self.times, times);
        let steps = times.steps.saturating_sub(before.steps);
        let mean_ms = |us: u64, before: u64| {
            (steps > 0).then(|| us.saturating_sub(before) as f64 / steps as f64 / 1000.0)
        };
        let scalars = [
            ("loss", status.loss),
            ("records_per_s", Some(status.records_per_s)),
            ("workers", Some(members as f64)),
            ("step_ms", mean_ms(times.step_us, before.step_us)),
            ("all_reduce_ms", mean_ms(times.reduce_us, before.reduce_us)),
        ];
        self.write(
            now,
            status.step,
            scalars.into_iter().map(|(tag, value)| (tag.to_owned(), value)),
        )
    }

    fn write(
        &mut self,
        now: SystemTime,
        step: u64,
        scalars: impl Iterator<Item = (String, Option<f64>)>,
    ) -> io::Result<()> {
        let value = |(tag, value): (String, Option<f64>)| {
            Some(Value { tag, simple_value: Some(value? as f32) })
        };
        let summary = Scalars { value: scalars.filter_map(value).collect() };
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        let event =
            Event { wall_time: wall(now), step, summary: Some(summary), ..Event::default() };
        // One write: a reader sees an event as a whole, or the beginning of one, which it reads
        // again later.
        self.file.write_all(&framed(&event.encode_to_vec()))
    }
}

/// Adds a point now and then, and a last one when the job is over.
pub(crate) async fn follow(mut events: EventFile, mut known: watch::Receiver<Option<Snapshot>>) {
    loop {
        let open = known.changed().await.is_ok();
        let snapshot = known.borrow_and_update().clone();
        let Some(snapshot) = snapshot else {
            if open {
                continue;
            }
            return;
        };
        let added = tokio::task::spawn_blocking(move || {
            let added = events.add(SystemTime::now(), &snapshot);
            (added.map_err(|error| (error, events.path.clone())), events)
        });
        let Ok((added, same)) = added.await else { return };
        if let Err((error, path)) = added {
            warn!(%error, path = %path.display(), "no more events are written for TensorBoard");
            return;
        }
        if !open {
            return;
        }
        events = same;
        tokio::select! {
            () = tokio::time::sleep(POINT_INTERVAL) => {}
            () = closed(known.clone()) => {}
        }
    }
}

/// Waits for the end of the job, whatever is said before.
async fn closed(mut known: watch::Receiver<Option<Snapshot>>) {
    while known.changed().await.is_ok() {}
}

/// `tensorflow.Event`, the fields that are used here.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    /// In a file's first event alone.
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Scalars>,
}

/// `tensorflow.Summary`.
#[derive(Clone, PartialEq, Message)]
struct Scalars {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

/// `tensorflow.Summary.Value`.
#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

fn wall(now: SystemTime) -> f64 {
    now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// An event as it lies in a file.
fn framed(event: &[u8]) -> Vec<u8> {
    let len = (event.len() as u64).to_le_bytes();
    [&len[..], &masked(crc32c(&len)).to_le_bytes(), event, &masked(crc32c(event)).to_le_bytes()]
        .concat()
}

/// A checksum as it is kept: that of a text which has checksums in it would be weak.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), bit by bit: there are a few hundred bytes a second.
fn crc32c(bytes: &[u8]) -> u32 {
    let mut crc = !0;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

const VERSION: &str = "brain.Event:2";
const POINT_INTERVAL: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::testing::spec;
    use crate::job::{Evaluated, Job, Time};

    /// Takes a file apart, checking its checksums.
    fn events(path: &Path) -> Vec<Event> {
        let bytes = std::fs::read(path).unwrap();
        let mut rest = bytes.as_slice();
        let mut events = Vec::new();
        while let Some((len, after)) = rest.split_first_chunk::<8>() {
            let (crc, after) = after.split_first_chunk::<4>().unwrap();
            assert_eq!(u32::from_le_bytes(*crc), masked(crc32c(len)));
            let (event, after) = after.split_at(u64::from_le_bytes(*len) as usize);
            let (crc, after) = after.split_first_chunk::<4>().unwrap();
            assert_eq!(u32::from_le_bytes(*crc), masked(crc32c(event)));
            events.push(Event::decode(event).unwrap());
            rest = after;
        }
        assert!(rest.is_empty());
        events
    }

    #[test]
    fn the_checksum_is_castagnolis() {
        // The check value of the catalogue of CRCs, and TFRecord's mask of it.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(masked(0), 0xa282_ead8);
    }

    #[test]
    fn each_step_has_one_point_with_what_is_known_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = EventFile::create(&folder.path().join("runs"), "mnist").unwrap();
        let mut snapshot = Job::new(spec()).snapshot(Time::default());
        let at = |s| UNIX_EPOCH + Duration::from_secs(s);
        file.add(at(1), &snapshot).unwrap();
        snapshot.status.step = 3;
        snapshot.status.records_per_s = 12.0;
        file.add(at(2), &snapshot).unwrap();
        file.add(at(3), &snapshot).unwrap();
        snapshot.status.step = 7;
        let metrics = [("accuracy".into(), Some(0.75)), ("loss".into(), None)].into();
        snapshot.status.evaluated = Some(Evaluated { step: 5, records: 10, metrics });
        snapshot.status.loss = Some(0.5);
        snapshot.tally.times = StepTimes { steps: 4, step_us: 8000, reduce_us: 2000 };
        file.add(at(4), &snapshot).unwrap();
        let name = file.path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(name.starts_with("events.out.tfevents.") && name.contains(".mnist."), "{name}");
        file.add(at(5), &snapshot).unwrap();
        let [version, third, fifth, seventh] = &events(&file.path)[..] else {
            panic!("four events")
        };
        assert_eq!(version.file_version.as_deref(), Some("brain.Event:2"));
        let scalars = |event: &Event| -> Vec<(String, f32)> {
            let values = event.summary.clone().unwrap().value.into_iter();
            values.map(|v| (v.tag, v.simple_value.unwrap())).collect()
        };
        let tagged = |scalars: &[(&str, f32)]| -> Vec<(String, f32)> {
            scalars.iter().map(|&(tag, value)| (tag.into(), value)).collect()
        };
        assert_eq!((third.step, third.wall_time), (3, 2.0));
        assert_eq!(scalars(third), tagged(&[("records_per_s", 12.0), ("workers", 0.0)]));
        assert_eq!((fifth.step, fifth.wall_time), (5, 4.0));
        assert_eq!(scalars(fifth), tagged(&[("validation/accuracy", 0.75)]));
        assert_eq!((seventh.step, seventh.wall_time), (7, 4.0));
        let expected = [
            ("loss", 0.5),
            ("records_per_s", 12.0),
            ("workers", 0.0),
            ("step_ms", 2.0),
            ("all_reduce_ms", 0.5),
        ];
        assert_eq!(scalars(seventh), tagged(&expected));
    }

    #[tokio::test(start_paused = true)]
    async fn the_last_step_is_written_when_the_job_is_over() {
        let folder = tempfile::tempdir().unwrap();
        let file = EventFile::create(folder.path(), "j").unwrap();
        let path = file.path.clone();
        let (publish, known) = watch::channel(None);
        let following = tokio::spawn(follow(file, known));
        for step in 1..=5 {
            let mut snapshot = Job::new(spec()).snapshot(Time::default());
            snapshot.status.step = step;
            publish.send_replace(Some(snapshot));
        }
        drop(publish);
        following.await.unwrap();
        assert_eq!(events(&path).last().unwrap().step, 5);
    }
}
