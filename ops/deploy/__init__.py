"""What a platform team deploys: images, compose, Kubernetes, a Helm chart, Prometheus rules, Grafana dashboards."""
