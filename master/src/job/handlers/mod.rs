//! Handlers of events that span the workers, the group and the data: one file for each concern.

mod hung;
mod inference;
mod links;
mod liveness;
mod onboarding;
mod publish;
mod replicas;
mod training;
