//! Event files for TensorBoard: scalars over steps.
//!
//! An event file is a sequence of frames (TFRecord): a length, the checksum of the length, an event
//! (a protobuf message of four fields), and the checksum of the event. The crates that write event
//! files are outdated and depend on an image library or another protobuf implementation. The format
//! needs three messages and a checksum, so it is implemented here.
//!
//! **Invariant:** a write error affects these files alone and never the job; it is logged once.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message;
use tokio::sync::watch;
use tracing::warn;

use crate::job::Snapshot;
use crate::scalars::{Point, Scalars};

/// Writer of one job's event file.
#[derive(Debug)]
pub(crate) struct EventFile {
    file: File,
    path: PathBuf,
    scalars: Scalars,
}

impl EventFile {
    /// Creates a new file in the subfolder of `folder` that has the job's name, which is the name
    /// of the run in TensorBoard. Folders that do not exist are created.
    ///
    /// # Errors
    /// The I/O error of the file system.
    pub(crate) fn create(folder: &Path, job: &str) -> io::Result<Self> {
        let folder = folder.join(job);
        std::fs::create_dir_all(&folder)?;
        let now = SystemTime::now();
        let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        // TensorBoard searches for `tfevents` in file names and reads files in the order of their
        // names. A master that resumes a job has another process id.
        let name = format!("events.out.tfevents.{seconds:010}.{job}.{}", std::process::id());
        let path = folder.join(name);
        let mut file = File::create_new(&path)?;
        let version =
            Event { wall_time: wall(now), file_version: Some(VERSION.into()), ..Event::default() };
        file.write_all(&framed(&version.encode_to_vec()))?;
        Ok(Self { file, path, scalars: Scalars::default() })
    }

    /// Appends a point for the snapshot's step and one for each evaluation, unless the file already
    /// has them.
    ///
    /// # Errors
    /// The I/O error of the file system.
    pub(crate) fn add(&mut self, now: SystemTime, snapshot: &Snapshot) -> io::Result<()> {
        let points = self.scalars.next(snapshot);
        points.into_iter().try_for_each(|point| self.write(now, point))
    }

    fn write(&mut self, now: SystemTime, Point { step, values, .. }: Point) -> io::Result<()> {
        let value = |(tag, value): (String, f64)| Value { tag, simple_value: Some(value as f32) };
        let summary = ScalarValues { value: values.into_iter().map(value).collect() };
        let step = i64::try_from(step).unwrap_or(i64::MAX);
        let event =
            Event { wall_time: wall(now), step, summary: Some(summary), ..Event::default() };
        // A single write: a reader sees the whole event or a prefix, which it reads again later.
        self.file.write_all(&framed(&event.encode_to_vec()))
    }
}

/// Appends a point at most once per `POINT_INTERVAL`, and a last one when the job ends.
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

/// Waits for the end of the job and ignores the snapshots before it.
async fn closed(mut known: watch::Receiver<Option<Snapshot>>) {
    while known.changed().await.is_ok() {}
}

/// `tensorflow.Event`, restricted to the fields that are used here.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since the Unix epoch.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    /// Set in the first event of a file only.
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<ScalarValues>,
}

/// `tensorflow.Summary`.
#[derive(Clone, PartialEq, Message)]
struct ScalarValues {
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

/// The TFRecord frame of an event.
fn framed(event: &[u8]) -> Vec<u8> {
    let len = (event.len() as u64).to_le_bytes();
    [&len[..], &masked(crc32c(&len)).to_le_bytes(), event, &masked(crc32c(event)).to_le_bytes()]
        .concat()
}

/// Masks a checksum as TFRecord does, because the CRC of data that contains its own CRC is weak.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), bitwise: it processes a few hundred bytes per second only.
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
    use crate::job::{Evaluated, Job, StepTimes, Time};

    /// Parses a file and verifies its checksums.
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
        // The check value in the catalogue of CRC algorithms, and TFRecord's mask.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(masked(0), 0xa282_ead8);
    }

    #[test]
    fn each_step_has_one_point_with_its_known_scalars() {
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
        snapshot.evaluations =
            std::sync::Arc::new(vec![(1, Evaluated { step: 5, records: 10, metrics })]);
        snapshot.status.loss = Some(0.5);
        snapshot.status.learning_rate = Some(0.25);
        snapshot.counters.times = StepTimes { steps: 4, step_us: 8000, reduce_us: 2000 };
        file.add(at(4), &snapshot).unwrap();
        let name = file.path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(name.starts_with("events.out.tfevents.") && name.contains(".mnist."), "{name}");
        assert!(file.path.parent().unwrap().ends_with("runs/mnist"), "a run per job");
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
        assert_eq!(scalars(third), tagged(&[("records_per_s", 12.0)]));
        assert_eq!((fifth.step, fifth.wall_time), (5, 4.0));
        assert_eq!(scalars(fifth), tagged(&[("validation/accuracy", 0.75)]));
        assert_eq!((seventh.step, seventh.wall_time), (7, 4.0));
        let expected = [
            ("loss", 0.5),
            ("learning_rate", 0.25),
            ("records_per_s", 12.0),
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
