"""What a platform team deploys: images, compose, Kubernetes, Prometheus rules, Grafana dashboards."""
