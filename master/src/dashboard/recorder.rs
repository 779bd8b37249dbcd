//! The recorder: it adds snapshots to the history, and stores the history.
//!
//! **Invariant:** a write error affects the history alone and never the job; it is logged once.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use super::board::Board;
use super::history::JobOptions;
use super::stored::{self, StoredHistory};
use crate::job::Snapshot;
use crate::jobdir::{Owner, write_atomically};

/// Adds the snapshots in `known` to the board until their sender is dropped, and stores the history
/// in `file` every few seconds and at the end.
pub(super) async fn record(
    mut known: watch::Receiver<Option<Snapshot>>,
    board: &Board,
    job: JobOptions,
    file: PathBuf,
) {
    match StoredHistory::read(&file) {
        Ok(stored) => stored.into_iter().for_each(|stored| board.resume(stored.history)),
        Err(error) => warn!(%error, path = %file.display(), "the history of the job begins anew"),
    }
    let owner = Owner::of(file.parent().unwrap_or(&file));
    board.describe(job);
    let (mut stored_at, mut has_failed) = (Instant::now(), false);
    loop {
        // The last snapshot is seen before the end.
        let is_open = known.changed().await.is_ok();
        if !is_open {
            board.end();
        } else if let Some(snapshot) = known.borrow_and_update().clone() {
            board.observe(snapshot);
        }
        if !is_open || stored_at.elapsed() >= STORE_INTERVAL {
            stored_at = Instant::now();
            if !owner.is_replaced()
                && let Err(error) = store(board, &file)
                && !std::mem::replace(&mut has_failed, true)
            {
                warn!(%error, path = %file.display(), "the history of the job is not stored");
            }
        }
        if !is_open {
            return;
        }
    }
}

fn store(board: &Board, file: &Path) -> io::Result<()> {
    let json = board.with(|page| stored::to_json(page.status, page.history));
    json.map_or(Ok(()), |json| write_atomically(file, &json))
}

const STORE_INTERVAL: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {

    use super::*;
    use crate::job::testing::spec;
    use crate::job::{Job, Time};

    fn snapshot(seconds: u64, step: u64) -> Snapshot {
        let mut snapshot = Job::new(spec()).snapshot(Time(Duration::from_secs(seconds)));
        snapshot.status.step = step;
        snapshot.status.loss = Some(f64::NAN);
        snapshot
    }

    #[tokio::test]
    async fn no_history_is_stored_in_the_directory_of_another_job() {
        let folder = tempfile::tempdir().unwrap();
        let (file, token) = (folder.path().join("history.json"), folder.path().join("token"));
        let write = |digit: &str| std::fs::write(&token, digit.repeat(64)).unwrap();
        for (later, is_stored) in [("1", false), ("0", true)] {
            write("0");
            let (publish, known) = watch::channel(None);
            let job = JobOptions { began: Duration::ZERO, options: Vec::new() };
            let board = Board::new(None);
            let recording = record(known, &board, job, file.clone());
            let seen = || board.with(|page| page.status.step);
            let ending = async move {
                publish.send_replace(Some(snapshot(1, 5)));
                while seen() != Some(5) {
                    tokio::task::yield_now().await;
                }
                write(later);
            };
            tokio::join!(recording, ending);
            assert_eq!(file.exists(), is_stored, "{later}");
        }
    }

    #[tokio::test]
    async fn a_history_is_stored_at_the_end_and_continued_by_the_next_master() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("history.json");
        for (seconds, step) in [(1, 5), (9, 7)] {
            let (publish, known) = watch::channel(None);
            let board = Board::new(None);
            let options = vec![("seed".into(), "7".into())];
            let job = JobOptions { began: Duration::from_secs(100), options };
            let recording = record(known, &board, job, file.clone());
            let seen = || board.with(|page| page.status.step);
            let publishing = async move {
                publish.send_replace(Some(snapshot(seconds, step)));
                while seen() != Some(step) {
                    tokio::task::yield_now().await;
                }
                publish.send_replace(Some(snapshot(seconds + 1, step + 1)));
            };
            tokio::join!(recording, publishing);
            assert_eq!(board.with(|page| page.live), Some(false));
        }
        let StoredHistory { status, history } = StoredHistory::read(&file).unwrap().unwrap();
        assert_eq!((status.step, history.began_s, history.options.len()), (8, Some(100.0), 1));
        let points: Vec<_> = history.curves.points.iter().map(|p| (p.at_s, p.step)).collect();
        assert_eq!(points, [(1.0, 5), (2.0, 6), (9.0, 7), (10.0, 8)]);
    }
}
