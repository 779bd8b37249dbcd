//! The clients of the stores.

use std::sync::Arc;
use std::time::Duration;

use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::{BackoffConfig, ObjectStore, RetryConfig};

use super::limits::IDLE_MAX;
use super::listings::Connector;
use super::{aws, errors};

/// A client of a store, of which `address.rs` lists the schemes: those that are neither S3 nor
/// Google's are Azure's.
pub(super) fn client(scheme: &str, bucket: &str) -> Result<Arc<dyn ObjectStore>, String> {
    if bucket.is_empty() || bucket.contains(|c: char| "?#%".contains(c) || c.is_whitespace()) {
        return Err(format!("{bucket:?} is not the name of a bucket"));
    }
    let url = format!("{scheme}://{bucket}");
    // The clients use the TLS provider of the process. If another provider is already installed, it
    // is used.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let connector = Connector { idle: IDLE_MAX };
    match scheme {
        "s3" | "s3a" => {
            let builder = aws::builder()?.with_url(url).with_retry(retries());
            Ok(Arc::new(builder.with_http_connector(connector).build().map_err(errors::of_setup)?))
        }
        "gs" => {
            let builder = GoogleCloudStorageBuilder::from_env().with_url(url);
            let builder = builder.with_retry(retries()).with_http_connector(connector);
            Ok(Arc::new(builder.build().map_err(errors::of_setup)?))
        }
        _ => {
            let builder = MicrosoftAzureBuilder::from_env().with_url(url);
            let builder = builder.with_retry(retries()).with_http_connector(connector);
            Ok(Arc::new(builder.build().map_err(errors::of_setup)?))
        }
    }
}

/// The client's own retries, for short failures; they are not logged.
fn retries() -> RetryConfig {
    let backoff = BackoffConfig {
        init_backoff: Duration::from_millis(50),
        max_backoff: RETRY_TIME,
        base: 2.0,
    };
    RetryConfig { backoff, max_retries: RETRIES, retry_timeout: RETRY_TIME }
}

const RETRIES: usize = 3;

const RETRY_TIME: Duration = Duration::from_secs(1);
