//! The HTTP server of a master in a cluster.

use std::net::Ipv6Addr;
use std::sync::{Arc, OnceLock};

use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::cli::process::{Failure, cannot};
use crate::job::Snapshot;
use crate::kube::anchor::Data;
use crate::kube::leader_lease::LeaseGuard;
use crate::kube::objects::{METRICS_PORT, TASK, Task};
use crate::metrics;

/// HTTP server of a master, for metrics and probes, from its start on.
pub(super) struct HttpServer {
    pub(super) publish: watch::Sender<Option<Snapshot>>,
    /// Set when this master has become the leader.
    pub(super) lead: Arc<OnceLock<LeaseGuard>>,
}

impl HttpServer {
    /// Serves on the port that the anchor names.
    pub(super) async fn serve(anchor: &Data) -> Result<Self, Failure> {
        let task = anchor.get(TASK).and_then(|text| serde_json::from_str::<Task>(text).ok());
        let port = task.map_or(METRICS_PORT, |task| task.metrics_port);
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
            .await
            .map_err(cannot(&format!("listen on port {port} for metrics")))?;
        let http = Self { publish: watch::Sender::new(None), lead: Arc::default() };
        let lead = Arc::clone(&http.lead);
        let ready: metrics::Ready = Arc::new(move || lead.get().is_some_and(LeaseGuard::is_valid));
        tokio::spawn(metrics::serve(listener, http.publish.subscribe(), ready));
        Ok(http)
    }
}
