//! Which rights of a user are missing to submit and follow jobs.

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::Api;
use kube::api::PostParams;

use super::client::{Cluster, ClusterError, is_code};

/// The rights that are missing in the namespace, as `create pods`.
///
/// # Errors
/// The server does not answer, or answers no such questions.
pub async fn missing(cluster: &Cluster) -> Result<Vec<String>, ClusterError> {
    let reviews: Api<SelfSubjectAccessReview> = cluster.api_of_all();
    let mut missing = Vec::new();
    for &(group, resource, verb) in RIGHTS {
        let attributes = ResourceAttributes {
            group: Some(group.into()),
            resource: Some(resource.into()),
            verb: Some(verb.into()),
            namespace: Some(cluster.namespace.clone()),
            ..ResourceAttributes::default()
        };
        let spec = SelfSubjectAccessReviewSpec {
            resource_attributes: Some(attributes),
            ..SelfSubjectAccessReviewSpec::default()
        };
        let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
        let answer = reviews.create(&PostParams::default(), &review).await;
        let answer = answer.map_err(|error| cluster.explain("ask for your rights", error))?;
        if !answer.status.is_some_and(|status| status.allowed) {
            missing.push(format!("{verb} {resource}"));
        }
    }
    Ok(missing)
}

/// Whether the namespace has the master's usual service account.
///
/// # Errors
/// It is not known: the user may not read service accounts.
pub async fn has_service_account(cluster: &Cluster) -> Result<bool, ClusterError> {
    let accounts: Api<ServiceAccount> = cluster.api();
    match accounts.get("elasticdl").await {
        Ok(_) => Ok(true),
        Err(error) if is_code(&error, 404) => Ok(false),
        Err(error) => Err(cluster.explain("read the service account", error)),
    }
}

/// API group, resource and verb of what `elasticdl train` and the other commands do.
const RIGHTS: &[(&str, &str, &str)] = &[
    ("batch", "jobs", "create"),
    ("batch", "jobs", "delete"),
    ("", "configmaps", "create"),
    ("", "configmaps", "list"),
    ("", "configmaps", "patch"),
    ("", "configmaps", "watch"),
    ("", "secrets", "create"),
    ("", "services", "create"),
    ("networking.k8s.io", "networkpolicies", "create"),
    ("", "pods", "list"),
    ("", "pods", "watch"),
    ("", "pods/log", "get"),
];

#[cfg(test)]
mod tests {
    use http::{Request, Response, StatusCode};
    use kube::client::Body;
    use serde_json::{Value, json};

    use super::*;

    /// A cluster that allows all but to `create` what is not a Job, and has no service account.
    fn cluster() -> Cluster {
        let service = tower::service_fn(|request: Request<Body>| async move {
            let (parts, body) = request.into_parts();
            if parts.method == http::Method::GET {
                assert_eq!(parts.uri.path(), "/api/v1/namespaces/ml/serviceaccounts/elasticdl");
                let status = json!({"kind": "Status", "status": "Failure", "code": 404,
                                    "message": "not found", "reason": "NotFound"});
                let response = Response::builder().status(StatusCode::NOT_FOUND);
                return response.body(Body::from(status.to_string().into_bytes()));
            }
            let review = body.collect_bytes().await.expect("a body in memory");
            let mut review: Value = serde_json::from_slice(&review).expect("JSON");
            let asked = &review["spec"]["resourceAttributes"];
            assert_eq!(asked["namespace"], "ml");
            let allowed = asked["verb"] != "create" || asked["resource"] == "jobs";
            review["status"] = json!({"allowed": allowed});
            Response::builder().body(Body::from(review.to_string().into_bytes()))
        });
        Cluster::with_client(kube::Client::new(service, "ml"), "ml")
    }

    #[tokio::test]
    async fn the_missing_rights_are_named() {
        let cluster = cluster();
        let expected =
            ["create configmaps", "create secrets", "create services", "create networkpolicies"];
        assert_eq!(missing(&cluster).await.unwrap(), expected);
        assert_eq!(has_service_account(&cluster).await, Ok(false));
    }
}
