//! Accepts connections and limits those that have not authenticated yet.
//!
//! **Invariant:** at most [`UNAUTHENTICATED_MAX`] connections are open without authentication, each
//! for at most [`AUTHENTICATION_TIMEOUT`], and when all are taken, the address that has the most
//! loses its oldest. No limit holds for one address before that: behind a network that masquerades
//! pods, all workers of a node have one, and return at once to a new master. So a peer that can
//! reach the port but has no token can neither exhaust the master's file descriptors nor lock out
//! other addresses. The TLS handshake counts towards these limits.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Sleep;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use tracing::warn;

use crate::connection_limit::{ConnectionLimit, Evicted, Limits, Permit};
use crate::limits::AUTHENTICATION_TIMEOUT;

/// Accepts connections of `listener` until the stream is dropped. While `open` is false the
/// listener is closed and connections are refused.
pub(super) fn accept(
    mut listener: TcpListener,
    mut open: watch::Receiver<bool>,
) -> ReceiverStream<io::Result<Connection>> {
    let (connections, incoming) = mpsc::channel(1);
    tokio::spawn(async move {
        let limits = Limits { total: UNAUTHENTICATED_MAX, per_address: UNAUTHENTICATED_MAX };
        let unauthenticated = ConnectionLimit::new(limits);
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = connections.closed() => return,
                () = until_open_is(&mut open, false) => {
                    let again = reopen(listener, &mut open, &connections).await;
                    let Some(again) = again else { return };
                    listener = again;
                    continue;
                }
            };
            match accepted {
                Ok((stream, peer)) => {
                    let (permit, evicted) = unauthenticated.admit(peer.ip());
                    let connection = Connection::new(stream, permit, evicted);
                    if connections.send(Ok(connection)).await.is_err() {
                        return;
                    }
                }
                Err(error) => {
                    // The usual cause is the limit of open files. It is transient, and an immediate
                    // retry would fail too.
                    warn!(%error, "can't accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    });
    ReceiverStream::new(incoming)
}

/// Waits until `open` equals `wanted`.
async fn until_open_is(open: &mut watch::Receiver<bool>, wanted: bool) {
    if open.wait_for(|&open| open == wanted).await.is_err() {
        // The server has ended and needs no connections.
        std::future::pending().await
    }
}

/// Closes the listener, waits until `open` is true, and binds its address again. `None` if the
/// server has ended.
async fn reopen<T>(
    listener: TcpListener,
    open: &mut watch::Receiver<bool>,
    connections: &mpsc::Sender<T>,
) -> Option<TcpListener> {
    let address = listener.local_addr();
    drop(listener);
    tokio::select! {
        () = until_open_is(open, true) => {}
        () = connections.closed() => return None,
    }
    loop {
        let bound = match &address {
            Ok(address) => TcpListener::bind(address).await,
            Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
        };
        match bound {
            Ok(listener) => return Some(listener),
            Err(error) => {
                warn!(%error, "can't listen again");
                tokio::time::sleep(REOPEN_PAUSE).await;
            }
        }
        if connections.is_closed() {
            return None;
        }
    }
}

/// A connection; reads fail once its authentication timeout has passed, or it was evicted.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    authentication: Authentication,
    deadline: Pin<Box<Sleep>>,
    evicted: Evicted,
}

impl Connection {
    fn new(stream: TcpStream, permit: Permit, evicted: Evicted) -> Self {
        if let Err(error) = stream.set_nodelay(true) {
            warn!(%error, "can't set TCP_NODELAY");
        }
        let deadline = Box::pin(tokio::time::sleep(AUTHENTICATION_TIMEOUT));
        Self {
            stream,
            authentication: Authentication(Arc::new(Mutex::new(Some(permit)))),
            deadline,
            evicted,
        }
    }

    /// Returns whether the connection has to be closed, because it has not authenticated.
    fn is_rejected(&mut self, cx: &mut Context<'_>) -> bool {
        if self.authentication.is_complete() {
            return false;
        }
        self.deadline.as_mut().poll(cx).is_ready()
            || Pin::new(&mut self.evicted).poll(cx).is_ready()
    }
}

/// Authentication state of a connection, attached to each of its requests. Holds a permit until a
/// request presents the token.
#[derive(Clone, Debug)]
pub(super) struct Authentication(Arc<Mutex<Option<Permit>>>);

impl Authentication {
    /// Marks the connection as authenticated and releases its permit.
    pub(super) fn complete(&self) {
        let permit = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(permit);
    }

    fn is_complete(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

impl Connected for Connection {
    type ConnectInfo = Authentication;

    fn connect_info(&self) -> Authentication {
        self.authentication.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_rejected(cx) {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Back-off after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Back-off after a failed bind.
const REOPEN_PAUSE: Duration = Duration::from_millis(500);
/// Largest number of connections that have not authenticated.
pub(super) const UNAUTHENTICATED_MAX: usize = 256;
