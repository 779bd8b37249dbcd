//! The HTTP server of a master in a cluster.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, OnceLock};

use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::exit::{Failure, cannot};
use crate::job::Snapshot;
use crate::kube::anchor::Data;
use crate::kube::leader_lease::LeaseGuard;
use crate::kube::objects::{METRICS_PORT, Task};
use crate::metrics;

/// HTTP server of a master, for metrics and probes, from its start on.
pub(super) struct HttpServer {
    pub(super) published: watch::Receiver<Option<Snapshot>>,
    /// Set when this master has become the leader.
    pub(super) lead: Arc<OnceLock<LeaseGuard>>,
}

impl HttpServer {
    /// Serves what is `published`, if the anchor says so, on the port that it names.
    pub(super) async fn serve(
        anchor: &Data,
        published: watch::Receiver<Option<Snapshot>>,
    ) -> Result<Self, Failure> {
        let task = Task::in_anchor(anchor);
        // An unreadable task is an error of the leader.
        let (port, is_served) =
            task.map_or((METRICS_PORT, false), |task| (task.metrics_port, task.serve_metrics));
        let listener =
            listen(port).await.map_err(cannot(&format!("listen on port {port} for metrics")))?;
        let http = Self { published, lead: Arc::default() };
        let lead = Arc::clone(&http.lead);
        let ready: metrics::Ready = Arc::new(move || lead.get().is_some_and(LeaseGuard::is_valid));
        let known = is_served.then(|| http.published.clone());
        tokio::spawn(metrics::serve(listener, known, ready));
        Ok(http)
    }
}

/// Listens on all addresses of the pod: of both families, or IPv4 alone where the node has no IPv6.
pub(super) async fn listen(port: u16) -> io::Result<TcpListener> {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
        Err(error) if error.raw_os_error() == Some(NO_SUCH_FAMILY) => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await
        }
        bound => bound,
    }
}

const NO_SUCH_FAMILY: i32 = rustix::io::Errno::AFNOSUPPORT.raw_os_error();
