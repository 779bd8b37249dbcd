//! Writes a rank's shard of a checkpoint, and the manifest, in a background thread.
//!
//! ```text
//!   trainer ── copy of its shard ──► writer thread ── shard, manifest ──► storage
//!           ◄── buffer for reuse, result ────┘
//! ```
//!
//! **Invariant:** the trainer waits only for the copy, into memory that is allocated already.
//! **Invariant:** no later checkpoint makes up for the last one, so its files are written again if
//! an attempt fails, for as long as their writer is told.

use std::collections::{BTreeSet, VecDeque};
use std::fs::{self, DirEntry};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, ScopedJoinHandle};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use elasticdl_data::storage::{Storage, StorageError};
use elasticdl_data::worker::{pause_unless_stopped, stop_flag, with_patience};
use elasticdl_proto::Generation;
use xxhash_rust::xxh3::Xxh3Default;

use super::load::{LoadError, manifest};
use super::manifest::{JobFingerprint, Manifest, shard_range};
use super::name::{self, MANIFEST, Name};
use super::retention::Retention;
use super::rows::{self, SavedPart};
use super::table_rows::TableRows;
use crate::session::checkpoint::{Written, WrittenRows};
use crate::session::header::StateRecord;
use crate::state_buffer::zeros;
use crate::tensors::is_finite;

/// The trainer's handle of the writer thread.
#[derive(Debug)]
pub(crate) struct CheckpointWriter {
    fingerprint: Arc<JobFingerprint>,
    requests: Sender<Request>,
    replies: Receiver<Reply>,
    completed: VecDeque<Completion>,
    /// A buffer for reuse.
    spare: Option<Vec<f32>>,
    /// The checkpoint that this rank is writing a shard of.
    current: Option<Current>,
    /// The last checkpoints with rows that this rank has written a part of. If they are complete,
    /// its rows have come from them, by steps alone.
    bases: VecDeque<Name>,
}

#[derive(Debug)]
struct Current {
    name: Name,
    patience: Duration,
    state: StateRecord,
    /// The shards that each rank writes, of the tables or of the optimizer's state.
    rows_of_ranks: Vec<Vec<u32>>,
}

/// The shard of a checkpoint that this rank writes.
#[derive(Clone, Copy, Debug)]
pub struct OwnShard {
    /// Step of the state.
    pub step: u64,
    /// Generation of the group that writes the checkpoint.
    pub generation: Generation,
    /// This rank.
    pub rank: usize,
    /// Number of ranks, each of which writes a shard.
    pub world_size: usize,
    /// How long a failed write of a file is repeated.
    pub patience: Duration,
}

/// Result of a request.
#[derive(Debug, PartialEq)]
pub enum Completion {
    /// The manifest of a step is written, or failed.
    Committed {
        /// Step of the checkpoint.
        step: u64,
        /// Name of the checkpoint.
        name: String,
        /// Bytes of all shards.
        result: Result<u64, String>,
    },
    /// This rank's shard of a step is written, or failed.
    Written {
        /// Step of the checkpoint.
        step: u64,
        /// What was written.
        result: Result<Written, String>,
    },
}

#[derive(Debug)]
enum Request {
    Commit { name: Name, manifest: Box<Manifest>, patience: Duration },
    Prepare { floats: usize },
    Write { name: Name, part: Box<RankPart>, patience: Duration },
}

/// What a rank writes of a checkpoint.
#[derive(Debug)]
struct RankPart {
    file: String,
    header: Vec<u8>,
    floats: Vec<f32>,
    rows: Option<RowsPart>,
}

/// The shards of tables, or the chunks of the optimizer's state, that a rank owns.
#[derive(Debug)]
struct RowsPart {
    file: String,
    owned: SavedPart,
    /// Checkpoints since which the changes of rows may be written, if they are complete.
    bases: VecDeque<Name>,
}

#[derive(Debug)]
enum Reply {
    Buffer(Vec<f32>),
    Completed(Completion),
}

impl CheckpointWriter {
    /// Starts the writer thread. If the flag of this thread that tells that the job stops is set
    /// during a wait, one attempt is left.
    ///
    /// # Errors
    /// The thread cannot be created.
    pub(crate) fn new(
        storage: Storage,
        fingerprint: Arc<JobFingerprint>,
        retention: Retention,
    ) -> io::Result<Self> {
        let (requests, queue) = channel();
        let (replies_tx, replies) = channel();
        let stops = stop_flag().unwrap_or_default();
        Builder::new().name("checkpoint".into()).spawn(move || {
            let thread = WriterThread { storage, retention, stops };
            while let Ok(request) = queue.recv() {
                // A trainer that has ended needs no reply.
                thread.handle(request, &replies_tx);
            }
        })?;
        Ok(Self {
            fingerprint,
            requests,
            replies,
            completed: VecDeque::new(),
            spare: None,
            current: None,
            bases: VecDeque::new(),
        })
    }

    /// The rows of this rank are others from now on than steps have made of those that it has
    /// written: its next part has all of them.
    pub(crate) fn forget_rows(&mut self) {
        self.bases.clear();
    }

    /// Allocates the buffer for a shard in a group of `world_size`, so that the next copy does not
    /// wait for the allocation.
    pub(crate) fn prepare(&mut self, world_size: usize) {
        let floats = self.fingerprint.floats().div_ceil(world_size);
        self.take_replies();
        if self.spare.as_ref().is_none_or(|spare| spare.capacity() < floats) {
            self.request(Request::Prepare { floats });
        }
    }

    /// Copies this rank's shard of the state, and requests that it be written, with what it owns of
    /// what is divided over the group: numbers of the shards of each rank, and this rank's.
    pub(crate) fn write(
        &mut self,
        shard: OwnShard,
        state: StateRecord,
        (parameters, slots): (&[f32], &[f32]),
        owned: Option<(Vec<Vec<u32>>, SavedPart)>,
    ) {
        let OwnShard { step, generation, rank, world_size, patience } = shard;
        self.take_replies();
        let name = Name { step, generation: generation.0, run: self.fingerprint.run.clone() };
        let Range { start, end } = shard_range(parameters.len() + slots.len(), rank, world_size);
        let overlap = |tensor: &[f32], before: usize| {
            let at = |float: usize| float.saturating_sub(before).min(tensor.len());
            at(start)..at(end)
        };
        let (parameter_range, slot_range) =
            (overlap(parameters, 0), overlap(slots, parameters.len()));
        let header =
            header(&[("parameters", parameter_range.len()), ("slots", slot_range.len())], start);
        let mut floats = self.spare.take().unwrap_or_default();
        floats.clear();
        floats.extend_from_slice(&parameters[parameter_range]);
        floats.extend_from_slice(&slots[slot_range]);
        let file = name::shard(rank, world_size);
        let (rows_of_ranks, owned) = owned.unzip();
        let rows_of_ranks = rows_of_ranks.unwrap_or_default();
        let rows = owned.map(|owned| {
            let mut bases = VecDeque::new();
            if matches!(owned, SavedPart::Rows(..)) {
                // It may be the second try of a checkpoint.
                self.bases.retain(|base| *base != name);
                bases.clone_from(&self.bases);
                self.bases.push_front(name.clone());
                self.bases.truncate(BASES_MAX);
            }
            RowsPart { file: name::rows(rank, world_size), owned, bases }
        });
        self.current = Some(Current { name: name.clone(), patience, state, rows_of_ranks });
        let part = Box::new(RankPart { file, header, floats, rows });
        self.request(Request::Write { name, part, patience });
    }

    /// Requests that the manifest be written of the checkpoint that this rank takes part in, all of
    /// whose shards are written.
    pub(crate) fn commit(&mut self, step: u64, parts: &[Written]) {
        let Some(current) = self.current.take_if(|current| current.name.step == step) else {
            return;
        };
        let Current { name, patience, state, rows_of_ranks } = current;
        let now =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let manifest =
            Box::new(Manifest::new(&self.fingerprint, state, parts, &rows_of_ranks, now));
        self.request(Request::Commit { name, manifest, patience });
    }

    /// Next result of a request, if there is one.
    pub(crate) fn poll(&mut self) -> Option<Completion> {
        self.take_replies();
        self.completed.pop_front()
    }

    fn take_replies(&mut self) {
        while let Ok(reply) = self.replies.try_recv() {
            match reply {
                Reply::Buffer(buffer) => self.recycle(buffer),
                Reply::Completed(done) => self.completed.push_back(done),
            }
        }
    }

    fn recycle(&mut self, buffer: Vec<f32>) {
        if self.spare.as_ref().is_none_or(|spare| spare.capacity() < buffer.capacity()) {
            self.spare = Some(buffer);
        }
    }

    fn request(&self, request: Request) {
        self.requests.send(request).expect("the writer thread outlives the trainer");
    }
}

/// State of the writer thread.
struct WriterThread {
    storage: Storage,
    retention: Retention,
    /// Set once the job stops.
    stops: Arc<AtomicBool>,
}

impl WriterThread {
    fn handle(&self, request: Request, replies_tx: &Sender<Reply>) {
        let reply = |reply| drop(replies_tx.send(reply));
        match request {
            Request::Commit { name, mut manifest, patience } => {
                let rows = manifest.rows.iter().flat_map(|rows| &rows.files);
                let chunks = manifest.optimizer.iter().flat_map(|chunks| &chunks.files);
                let rows = rows.chain(chunks).map(|file| file.bytes);
                let bytes = manifest.shards.iter().map(|shard| shard.bytes).chain(rows).sum();
                let path = format!("{name}/{MANIFEST}");
                let result = self.patiently(&path, patience, || {
                    manifest.rows.as_mut().map_or(Ok(()), |rows| self.chain(rows))?;
                    let text = vec![manifest.encode().into()];
                    self.storage.write(&path, text).map_err(|error| error.to_string())
                });
                if result.is_ok() {
                    self.clear(&name, &manifest);
                }
                reply(Reply::Completed(Completion::Committed {
                    step: name.step,
                    name: name.to_string(),
                    result: result.map(|()| bytes),
                }));
            }
            Request::Prepare { floats } => reply(Reply::Buffer(zeros(floats))),
            Request::Write { name, part, patience } => {
                let RankPart { file, header, floats, mut rows } = *part;
                let began = Instant::now();
                // First, as a step copies what it changes and this thread needs.
                let balance = rows.as_mut().map_or(0, |rows| rows.owned.take_balance());
                let floats = Arc::new(floats);
                let written = self.write(&format!("{name}/{file}"), header, &floats, patience);
                let result = written.and_then(|written| {
                    let rows = rows.map(|rows| self.write_rows(&name, rows, patience));
                    let rows = rows.transpose()?.map(|rows| WrittenRows { balance, ..rows });
                    Ok(Written { rows, ..written })
                });
                let ms = began.elapsed().as_millis() as u64;
                match result {
                    Ok(Written { bytes, .. }) => {
                        tracing::info!(%name, file, bytes, ms, "part written");
                    }
                    // The last rank that fails removes the folder that the first one has made.
                    Err(_) => self.storage.remove_if_empty(&name.to_string()),
                }
                // If the store still references the buffer, the next one is newly allocated.
                if let Ok(floats) = Arc::try_unwrap(floats) {
                    reply(Reply::Buffer(floats));
                }
                reply(Reply::Completed(Completion::Written { step: name.step, result }));
            }
        }
    }

    /// Writes a file.
    fn store(&self, path: &str, parts: &[Bytes], patience: Duration) -> Result<(), String> {
        let write = || self.storage.write(path, parts.to_vec()).map_err(|error| error.to_string());
        self.patiently(path, patience, write)
    }

    /// Writes the file at `path`, in several attempts if it is written with patience.
    fn patiently(
        &self,
        path: &str,
        patience: Duration,
        mut write: impl FnMut() -> Result<(), String>,
    ) -> Result<(), String> {
        // A job that stops already has said how long it waits.
        let has_stopped = self.stops.load(Ordering::Acquire);
        let sleep = |pause| match has_stopped {
            true => (std::thread::sleep(pause), false).1,
            false => pause_unless_stopped(&self.stops, pause),
        };
        write().or_else(|error| with_patience(path, patience, error, write, sleep))
    }

    fn write(
        &self,
        path: &str,
        header: Vec<u8>,
        floats: &Arc<Vec<f32>>,
        patience: Duration,
    ) -> Result<Written, String> {
        // Checked in this thread, so that the trainer does not wait for it.
        if !is_finite(floats) {
            return Err(
                "the state contains a NaN or an infinity, so no checkpoint is written".into()
            );
        }
        let header = Bytes::from(header);
        let data = Bytes::from_owner(Floats(Arc::clone(floats)));
        let bytes = (header.len() + data.len()) as u64;
        let parts = [header.clone(), data.clone()];
        std::thread::scope(|scope| {
            let digest = || {
                let mut digest = Xxh3Default::new();
                digest.update(&header);
                digest.update(&data);
                digest.digest128()
            };
            // Concurrently with the write, which mostly waits for the disk; after it, if the system
            // starts no more threads.
            let thread = Builder::new().spawn_scoped(scope, digest).ok();
            self.store(path, &parts, patience)?;
            let digest = match thread.map(ScopedJoinHandle::join) {
                Some(digest) => digest.map_err(|_| "the digest's thread panicked".to_owned())?,
                None => digest(),
            };
            Ok(Written { bytes, digest, rows: None })
        })
    }

    fn write_rows(
        &self,
        name: &Name,
        RowsPart { file, owned, bases }: RowsPart,
        patience: Duration,
    ) -> Result<WrittenRows, String> {
        let complete = bases.iter().find_map(|base| Some((base, self.rows_of(base).ok()??)));
        let base = complete.filter(|(_, rows)| rows.may_be_base());
        let base = base.map(|(base, _)| (base.step, base.generation));
        let (parts, written) = rows::encode(owned, base)?;
        self.store(&format!("{name}/{file}"), &parts, patience).map(|()| written)
    }

    /// What a complete checkpoint says of its rows.
    fn rows_of(&self, name: &Name) -> Result<Option<TableRows>, LoadError> {
        manifest(&self.storage.join(&name.to_string())).map(|manifest| manifest.rows)
    }

    /// Appends `rows`, of which all files are written, to the checkpoints that they are based on.
    fn chain(&self, rows: &mut TableRows) -> Result<(), String> {
        let names = rows.bases().into_iter().filter_map(Name::parse);
        let base = |name: Name| match self.rows_of(&name) {
            Ok(Some(rows)) => Ok(rows),
            _ => Err(format!("{name}, since which rows were written, is gone")),
        };
        let bases = names.map(base).collect::<Result<Vec<_>, _>>()?;
        rows.append_to(&bases);
        Ok(())
    }

    /// The checkpoints that `names` are based on.
    fn bases_of(&self, mut names: Vec<Name>) -> Result<BTreeSet<Name>, StorageError> {
        let mut bases = BTreeSet::new();
        while let Some(name) = names.pop() {
            let rows = match self.rows_of(&name) {
                Err(LoadError::Storage(error)) => return Err(error),
                // A damaged checkpoint needs no other one.
                rows => rows.ok().flatten(),
            };
            for base in rows.iter().flat_map(TableRows::bases).filter_map(Name::parse) {
                if bases.insert(base.clone()) {
                    names.push(base);
                }
            }
        }
        Ok(bases)
    }

    /// Deletes the checkpoints that `newest`, whose `manifest` is written, makes superfluous.
    /// Failed deletions are retried after the next checkpoint.
    fn clear(&self, newest: &Name, manifest: &Manifest) {
        let best = manifest.state.evaluation.best.map(|(step, _)| step);
        let result = self.storage.list_folders(name::PREFIX).and_then(|files| {
            let all = Name::all(&files);
            let names = self.retention.to_remove(&all, newest, best);
            let kept =
                all.iter().filter(|(name, is_complete)| **is_complete && !names.contains(name));
            let bases = match manifest.rows {
                Some(_) => self.bases_of(kept.map(|(name, _)| name.clone()).collect())?,
                None => BTreeSet::new(),
            };
            names
                .iter()
                .filter(|name| !bases.contains(name))
                .filter(|name| name.run == newest.run || self.is_earlier(name))
                .try_for_each(|name| self.storage.remove_folder(&name.to_string(), MANIFEST))
        });
        if let Err(error) = result {
            tracing::warn!(%error, "old checkpoints could not be deleted");
        }
    }

    /// Whether a checkpoint of another run was there when this job began: the folder is in the
    /// job's directory, whose token is written then. If the directory was removed or renamed, a
    /// later job of the same name may have taken its place, and its checkpoints stay.
    fn is_earlier(&self, name: &Name) -> bool {
        let folder = Path::new(self.storage.address());
        let began = fs::metadata(folder.with_file_name(TOKEN)).and_then(|token| token.modified());
        let written = |entry: io::Result<DirEntry>| entry?.metadata()?.modified();
        let newest = fs::read_dir(folder.join(name.to_string()))
            .and_then(|entries| entries.map(written).collect::<io::Result<Vec<_>>>())
            .map(|times| times.into_iter().max());
        matches!((newest, began), (Ok(Some(newest)), Ok(began)) if newest < began)
    }
}

/// Checkpoints that a rank remembers, as the last ones may have stayed incomplete.
const BASES_MAX: usize = 4;

/// Name of the file in a job's directory that is written when the job begins.
const TOKEN: &str = "token";

/// Floats as bytes, without a copy.
struct Floats(Arc<Vec<f32>>);

impl AsRef<[u8]> for Floats {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(self.0.as_slice())
    }
}

/// The header of a safetensors file with consecutive tensors; empty tensors are omitted. `start`:
/// position of the first float in the state.
fn header(tensors: &[(&str, usize)], start: usize) -> Vec<u8> {
    let mut fields = serde_json::Map::new();
    fields.insert("__metadata__".into(), serde_json::json!({ "start": start.to_string() }));
    let mut at = 0;
    for (name, floats) in tensors.iter().filter(|(_, floats)| *floats > 0) {
        let end = at + floats * size_of::<f32>();
        let tensor =
            serde_json::json!({ "dtype": "F32", "shape": [floats], "data_offsets": [at, end] });
        fields.insert((*name).into(), tensor);
        at = end;
    }
    let mut json = serde_json::Value::Object(fields).to_string().into_bytes();
    // Tensors begin at a multiple of 8 bytes.
    json.resize(json.len().next_multiple_of(8), b' ');
    [&(json.len() as u64).to_le_bytes()[..], &json].concat()
}
