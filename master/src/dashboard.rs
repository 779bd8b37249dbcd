//! The dashboard of a job: a page in the browser with its state and history.
//!
//! ```text
//!  snapshots ──► recorder ──► Board ◄── server ◄── browser, with the key in the link
//!                   │                     └──► PageRequest: scale, stop
//!             history.json ──► report     the same page as one file
//!
//!  anchor of a cluster job ──► RemotePage, in the process of `elasticdl dashboard`
//! ```
//!
//! Recorder and server run in a thread of their own, so that a browser never delays the job.
//!
//! **Invariants:** the page shows what a job shows of itself, and decides nothing. It is served on
//! a loopback address only. No request reads the job or commands it without the key, which is
//! derived from the job's token and opens nothing else. The key is in no log.

mod board;
mod history;
mod key;
mod page;
mod recorder;
mod report;
mod request;
mod server;
mod stored;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use elasticdl_proto::Status;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::warn;

use self::board::Board;
pub(crate) use self::history::{History, JobOptions};
pub(crate) use self::key::DashboardKey;
pub use self::report::report_of;
pub(crate) use self::request::{PageCommand, PageRequest, ScaleLimits};
pub use self::stored::StoredHistory;
pub(crate) use self::stored::pack;
use crate::job::Snapshot;
use crate::panics::Dispensable;
use crate::token::Token;

/// The link of the page of a local job, whose master serves it at `address`.
#[must_use]
pub fn link(token: &Token, address: SocketAddr) -> String {
    DashboardKey::of(token).link(address)
}

/// Where a job's page is served, and what it may do.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) listener: TcpListener,
    pub(crate) key: DashboardKey,
    pub(crate) scale: ScaleLimits,
    pub(crate) requests: mpsc::Sender<PageRequest>,
}

/// A running recorder, and the server of the page, if there is one.
#[derive(Debug)]
pub(crate) struct Dashboard(oneshot::Receiver<()>);

impl Dashboard {
    /// Records the history of the snapshots in `known` to `file`, and serves the page. Must be
    /// called within a runtime.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(crate) fn start(
        known: watch::Receiver<Option<Snapshot>>,
        job: JobOptions,
        file: PathBuf,
        served: Option<Served>,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        // The listener is moved to the runtime of the other thread.
        let served = served
            .map(|Served { listener, key, scale, requests }| {
                let listener = listener.into_std()?;
                let _entered = runtime.enter();
                Ok::<_, io::Error>((TcpListener::from_std(listener)?, key, scale, requests))
            })
            .transpose()?;
        let (ending, ended) = oneshot::channel();
        thread::Builder::new().name("dashboard".into()).spawn(move || {
            let _dispensable = Dispensable::begin();
            let scale = served.as_ref().map(|(_, _, scale, _)| *scale);
            let board = Arc::new(Board::new(scale));
            runtime.block_on(async {
                let site = served.map(|(listener, key, _, requests)| {
                    let site = server::Site { board: Arc::clone(&board), key, requests };
                    tokio::spawn(server::serve(listener, Arc::new(site)))
                });
                recorder::record(known, &board, job, file).await;
                if site.is_some() {
                    board.await_readers().await;
                }
            });
            runtime.shutdown_background();
            // The receiver may have been dropped.
            let _ = ending.send(());
        })?;
        Ok(Self(ended))
    }

    /// Waits until the history is stored, and open pages have received it. The sender of the
    /// snapshots must have been dropped.
    pub(crate) async fn end(self) {
        if self.0.await.is_err() {
            warn!("the history of the job was not stored");
        }
    }
}

/// The page of a job whose master runs elsewhere, served by this process.
#[derive(Debug)]
pub(crate) struct RemotePage {
    board: Arc<Board>,
    /// The address of the page, with its key.
    pub(crate) link: String,
    /// What users request through the page.
    pub(crate) requests: mpsc::Receiver<PageRequest>,
}

impl RemotePage {
    /// Serves the page in the caller's runtime, at `listener`, with a key of its own.
    ///
    /// # Errors
    /// The listener has no address, or the system gives no random bytes.
    pub(crate) fn open(listener: TcpListener, scale: ScaleLimits) -> io::Result<Self> {
        let key = DashboardKey::of(&Token::random()?);
        let link = key.link(listener.local_addr()?);
        let board = Arc::new(Board::new(Some(scale)));
        let (sender, requests) = mpsc::channel(REQUESTS_MAX);
        let site = server::Site { board: Arc::clone(&board), key, requests: sender };
        tokio::spawn(server::serve(listener, Arc::new(site)));
        Ok(Self { board, link, requests })
    }

    /// Shows the status of the job at this age, and the history that its master has stored.
    pub(crate) fn show(&self, at_s: f64, status: Status, stored: History) {
        self.board.show(at_s, status, stored);
    }

    /// Tells open pages that the job has ended.
    pub(crate) async fn end(self) {
        self.board.end();
        self.board.await_readers().await;
    }
}

const REQUESTS_MAX: usize = 4;
