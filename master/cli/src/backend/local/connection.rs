//! A connection to a running master.

use std::error::Error as _;
use std::path::Path;
use std::time::Duration;

use elasticdl_master::jobdir::{self, LookupError};
use elasticdl_master::token::Token;
use elasticdl_proto::wire::StatusRequest;
use elasticdl_proto::wire::master_client::MasterClient;
use tonic::transport::{self, Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status};

use crate::process::Failure;

/// An authenticated connection to the master of a job.
pub(super) struct Connection {
    client: MasterClient<Channel>,
    token: Token,
}

/// Error of [`Connection::open`].
pub(super) enum OpenError {
    /// The job's directory names no running master.
    Lookup(LookupError),
    /// The master that the directory names does not answer.
    NoAnswer(jobdir::Endpoint),
}

impl Connection {
    /// Connects to the master that the job's directory `root` names.
    pub(super) async fn open(root: &Path) -> Result<Self, OpenError> {
        let (endpoint, token) = jobdir::look_up(root).map_err(OpenError::Lookup)?;
        let no_answer = |_| OpenError::NoAnswer(endpoint);
        let address = Self::address(root, &endpoint)?.map_err(no_answer)?;
        let channel =
            address.connect_timeout(TIMEOUT).timeout(TIMEOUT).connect().await.map_err(no_answer)?;
        let client = MasterClient::new(channel).max_decoding_message_size(REPLY_BYTES_MAX);
        Ok(Self { client, token })
    }

    /// The address to dial, with the job's CA if its master serves TLS.
    fn address(
        root: &Path,
        endpoint: &jobdir::Endpoint,
    ) -> Result<Result<Endpoint, transport::Error>, OpenError> {
        let Some(ca) = jobdir::ca_path(root) else {
            return Ok(Endpoint::from_shared(format!("http://{}", endpoint.address)));
        };
        let pem = std::fs::read_to_string(&ca).map_err(|source| {
            OpenError::Lookup(LookupError::Unreadable { path: ca.clone(), source })
        })?;
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(pem))
            .domain_name(jobdir::MASTER_DNS_NAME)
            .timeout(TIMEOUT);
        let address = Endpoint::from_shared(format!("https://{}", endpoint.address));
        Ok(address.and_then(|address| address.tls_config(tls)))
    }

    /// Asks for the job's status.
    pub(super) async fn status(&mut self) -> Result<elasticdl_proto::Status, Status> {
        let status =
            self.request(StatusRequest, async |client, request| client.status(request).await);
        status.await
    }

    /// Sends one request by `call`.
    pub(super) async fn request<Q, A>(
        &mut self,
        message: Q,
        call: impl AsyncFnOnce(
            &mut MasterClient<Channel>,
            Request<Q>,
        ) -> Result<tonic::Response<A>, Status>,
    ) -> Result<A, Status> {
        let mut request = Request::new(message);
        let bearer = self.token.to_bearer().parse().expect("hexadecimal digits are a valid header");
        request.metadata_mut().insert("authorization", bearer);
        call(&mut self.client, request).await.map(tonic::Response::into_inner)
    }
}

impl OpenError {
    /// The error for the user, about the job in `root`.
    pub(super) fn to_failure(&self, root: &Path) -> Failure {
        match self {
            Self::Lookup(error @ LookupError::NotRunning { .. }) => {
                Failure::failed(error.to_string())
            }
            Self::Lookup(error) => Failure::usage(error.to_string()),
            Self::NoAnswer(endpoint)
                if jobdir::is_abandoned(root) && jobdir::count_workers(root) == 0 =>
            {
                Failure::failed(format!(
                    "the job in {} does not run: its master (process {}) and its workers are \
                     gone; to continue from its newest checkpoint: elasticdl train --resume {0}",
                    root.display(),
                    endpoint.pid
                ))
            }
            Self::NoAnswer(endpoint) if jobdir::is_abandoned(root) => Failure::failed(format!(
                "the master of the job in {} (process {}) is gone; its workers continue for a \
                 while and wait for the next one; to start it: elasticdl train --resume {0}",
                root.display(),
                endpoint.pid
            )),
            Self::NoAnswer(endpoint) => Failure::failed(format!(
                "the job in {} is not running: its master (process {}) does not answer at {}",
                root.display(),
                endpoint.pid,
                endpoint.address
            )),
        }
    }
}

/// An error status of the master, for the user.
pub(super) fn to_failure(root: &Path, status: &Status) -> Failure {
    match status.code() {
        Code::InvalidArgument => Failure::usage(status.message()),
        // The deadline of a request on this side.
        Code::Cancelled | Code::DeadlineExceeded => {
            let process = jobdir::look_up(root).map(|(master, _)| master.pid);
            let process = process.map_or(String::new(), |pid| format!(" (process {pid})"));
            Failure::failed(format!(
                "the master of {}{process} has not answered within {} s: it is stopped, or its \
                 machine is busy",
                root.display(),
                TIMEOUT.as_secs()
            ))
        }
        // The connection has failed: the master has ended since it was opened.
        _ if status.source().is_some() => jobdir::look_up(root)
            .map_or_else(OpenError::Lookup, |(endpoint, _)| OpenError::NoAnswer(endpoint))
            .to_failure(root),
        _ => Failure::failed(format!(
            "the master of {} answered: {}",
            root.display(),
            status.message()
        )),
    }
}

/// More than the status of the largest job.
const REPLY_BYTES_MAX: usize = 16 << 20;
const TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_master_that_does_not_answer_has_given_no_answer() {
        let text = |status| to_failure(Path::new("/none"), &status).text;
        // What tonic makes of the deadline of a request.
        for status in [Status::cancelled("Timeout expired"), Status::deadline_exceeded("late")] {
            let text = text(status);
            assert!(text.contains("has not answered within 5 s: it is stopped"), "{text}");
        }
        assert_eq!(text(Status::internal("no")), "the master of /none answered: no");
    }
}
